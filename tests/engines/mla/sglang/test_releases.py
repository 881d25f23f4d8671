"""Releases of sglang whose calls of FlashMLA are not known here."""

from __future__ import annotations

import importlib.metadata

import pytest

from backend_core.engines import entry, sglang_flag
from mla_backend.engines import sglang as adapter


@pytest.mark.parametrize("version", ["0.5.20", "0.5.22"])
def test_they_are_left_alone_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str], version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    adapter._install(None, None)  # would fail on anything that it looked at
    assert log_lines == [
        "kda-dsv4-backend: DeepSeek-V4 attention stays sglang's: its calls are made here in 0.5.23"
        f" to 0.5.23, got {version}"
    ]


def test_the_family_is_known_in_every_release() -> None:
    entry.sglang.mla()
    assert [claim.kind for claim in sglang_flag._families["mla"]] == ["mla", "sparse_mla"]
