"""What adapters share: the steps it covers, plans that stay, and its graphs on a Hopper GPU."""

from __future__ import annotations

import math
import random

import pytest
import torch

from backend_core.target import KNOWN_TARGETS, detect_target
from mla_backend.engines.mla_decoder import MlaDecoder
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import SCALE, expected, make_case

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
    assert large.covers(4, 1) and not large.covers(5, 1)
    with pytest.raises(LookupError, match="compared with fa3 at up to 32 query rows per request"):
        decoder(64)
    assert decoder(4, most=5000).covers(4095, 1) and not decoder(4, most=5000).covers(4096, 1)
    drafts = decoder(16, (1, 2, 4))
    assert drafts.covers(4, 1) and drafts.covers(4, 2) and not drafts.covers(1, 4)


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
    assert max(errors_of_replays(page_size).values()) < 0.01


def errors_of_replays(page_size: int) -> dict[int, float]:
    """Relative errors of a decode against float64, by batch: 32 heads, ragged, NaN between them.

    The first plan of each batch is captured with its calls in a CUDA graph, and the graph is
    replayed for other lengths that are planned into it; planning must not wait for the GPU.
    """
    device = torch.device("cuda")
    decoder = MlaDecoder(
        detect_target(device),
        device,
        heads=32,
        page_size=page_size,
        kernel="fa3",
        query_tokens=(1,),
        max_requests=64,
    )
    decoder.warm_up()
    found = {}
    for requests in (1, 4, 16):
        rng = random.Random(requests)
        drawn = [rng.randint(1, 5 * page_size) for _ in range(requests)]
        drawn[-1] = 0 if requests > 1 else drawn[-1]
        case = make_case(MlaSpec(32, page_size), drawn, seed=requests, device=device)
        lengths = torch.zeros_like(case.lengths)
        step = decoder.step(lengths, case.block_table, 1)
        parts = (case.q_latent[:, 0], case.q_rope[:, 0], case.kv_latent, case.kv_rope)
        step.attend(*parts, SCALE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = step.attend(*parts, SCALE)
        lengths.copy_(case.lengths)
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder.step(lengths, case.block_table, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        found[requests] = worst(out, expected(case)[0][:, 0])
    return found


def worst(out: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative error of a request's output; infinite where an empty one is not 0."""
    off, size = (x.double().flatten(1).norm(dim=1) for x in (out - want, want))
    errors = (off / size).masked_fill((off == 0) & (size == 0), 0.0)
    return float(errors.nan_to_num(math.inf, posinf=math.inf).max())
