"""What adapters share: the steps it covers, plans that stay, and its graphs on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from backend_core.target import KNOWN_TARGETS, detect_target
from benchmarks import mla_vllm
from softmax_backend.engines.mla_decoder import MlaDecoder

H200 = KNOWN_TARGETS["H200"]


def decoder(heads: int, tokens: tuple[int, ...] = (1,), most: int = 8) -> MlaDecoder:
    return MlaDecoder(
        H200,
        torch.device("cpu"),
        heads=heads,
        page_size=1888,
        kernel="fa3",
        query_tokens=tokens,
        max_requests=most,
    )


def test_the_steps_that_are_covered() -> None:
    small, large = decoder(8), decoder(32, most=512)
    assert all(small.covers(n, 1) for n in (1, 8))
    assert not small.covers(0, 1) and not small.covers(9, 1) and not small.covers(1, 2)
    assert large.covers(16, 1) and not large.covers(17, 1)
    assert not any(decoder(64).covers(n, 1) for n in range(1, 9))
    assert decoder(4, most=5000).covers(4095, 1) and not decoder(4, most=5000).covers(4096, 1)
    drafts = decoder(16, (1, 2, 4))
    assert drafts.covers(4, 1) and drafts.covers(8, 2) and not drafts.covers(1, 4)


def test_a_page_size_that_no_path_serves_is_an_error_at_load() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        MlaDecoder(
            H200,
            torch.device("cpu"),
            heads=4,
            page_size=0,
            kernel="fa3",
            query_tokens=(1,),
            max_requests=8,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [64, 240, 944, 1888, 1920])
def test_a_captured_step_serves_other_lengths(page_size: int) -> None:
    if not torch.cuda.is_available() or detect_target().key != "nvidia_sm90":
        pytest.skip("needs a Hopper GPU")
    assert mla_vllm.check(page_size)
