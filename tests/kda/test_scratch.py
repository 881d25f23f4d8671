"""Scratch memory that could not grow: the next call finds it as large as it says."""

from __future__ import annotations

import pytest
import torch

from kda_backend.scratch import Scratch
from tests.kda.cases import Backend
from tests.out_of_memory import failing

SMALL, LARGE = (4, 1024, 128), (64, 2048, 256)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("between", [False, True])
def test_a_failed_growth_is_no_growth(
    number: int, between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Scratch(torch.device("cpu"))
    addresses = scratch.addresses(*SMALL)
    with (
        failing(monkeypatch, number) as asked,
        pytest.raises(torch.OutOfMemoryError),
    ):
        scratch.reserve(*LARGE)
    assert len(asked) == number + 1
    if between:
        assert scratch.addresses(*SMALL) == addresses  # of memory that is there
    tiles, totals = scratch.buffers(*LARGE)
    assert tiles.numel() >= 64 * 2048 and totals.numel() >= 64 * 256
    assert scratch.flags().numel() >= 64
    assert scratch.addresses(*LARGE)[0] == tiles.data_ptr()


@pytest.mark.parametrize("number", [0, 1])
def test_a_failed_growth_of_segments_is_no_growth(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Scratch(torch.device("cpu"))
    with failing(monkeypatch, number), pytest.raises(torch.OutOfMemoryError):
        scratch.segment_addresses(8, (256, 128), 24)
    scratch.segment_addresses(8, (256, 128), 24)
    assert scratch.nbytes >= 8 * (256 + 128 + 4 * 24)


def test_a_prefill_after_one_that_ran_out_of_memory(
    kernels: Backend, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its first allocations failed; the interpreter makes more of its own."""
    case = kernels.case(seed, [66], dims="narrow")
    want, want_state = kernels.chunk(case)
    for number in range(12):
        scratch = Scratch(case.state.device)
        with failing(monkeypatch, number) as asked:
            try:
                kernels.chunk(case, scratch=scratch)
            except torch.OutOfMemoryError:
                pass
            else:
                assert 5 < len(asked) <= number  # every allocation has failed once
                return
        got, state = kernels.chunk(case, scratch=scratch)
        assert torch.equal(got, want) and torch.equal(state, want_state)
