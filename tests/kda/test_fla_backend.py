"""The entry point by which torch lets this package wait for FLA; tests with FLA's wheel are in
``tests/engines/kda/fla_core``."""

from __future__ import annotations

import sys

import pytest
import torch

from kda_backend import fla_backend


@pytest.mark.parametrize(("setting", "waits"), [(None, 0), ("", 0), ("0", 0), ("off", 0), ("1", 1)])
def test_it_waits_for_fla_where_the_variable_is_set(
    setting: str | None, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv(fla_backend.VARIABLE, raising=False)
    if setting is not None:
        monkeypatch.setenv(fla_backend.VARIABLE, setting)
    before = len(sys.meta_path)
    fla_backend.autoload()
    assert len(sys.meta_path) - before == waits


def test_calls_are_judged_without_being_made() -> None:
    q, k, v = (torch.randn(1, 70, 2, 64) for _ in range(3))
    g, beta = -torch.rand(1, 70, 2, 64), torch.rand(1, 70, 2)
    assert fla_backend.refusal(q, k, v, g, beta, state_v_first=True) is None
    assert "chunk_size" in str(fla_backend.refusal(q, k, v, g, beta, chunk_size=16))
    bounds = torch.tensor([0, 70], dtype=torch.int32)
    # FLA has no use for it alone; here it was accepted, and the call refused
    assert "cu_seqlens_cpu" in str(fla_backend.refusal(q, k, v, g, beta, cu_seqlens_cpu=bounds))
    bounds = bounds.float()
    assert "cu_seqlens" in str(fla_backend.refusal(q, k, v, g, beta, cu_seqlens=bounds))
