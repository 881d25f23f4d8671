"""Prefill and decode in a CUDA graph: nothing on the call path reads the device from the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend_core.testing.numerics import poisoned
from kda_backend.scratch import Scratch
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import Case
from tests.kda.cases import ON_GPU, Backend, assert_same_bits

pytestmark = pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")


@pytest.fixture(params=["kernels", "kernels_128"])
def kernels(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    return Backend(request.param, device)


def pool_of(case: Case) -> torch.Tensor:
    """The case's states at slots 1, 2, ..."""
    shape = (len(case.state) + 2, *case.state.shape[1:])
    pool = poisoned(*shape, dtype=torch.float32, device=case.state.device)
    pool[1:-1] = case.state
    return pool


@pytest.mark.parametrize("operator", ["chunk", "recurrent"])
def test_a_replay_computes_what_the_call_does(kernels: Backend, seed: int, operator: str) -> None:
    lengths = (130, 0, 65) if operator == "chunk" else (1, 1, 1)
    case = kernels.case(seed, lengths)
    device = case.q.device
    indices = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device=device)
    pools = [pool_of(case) for _ in range(3)]
    outs = [torch.full_like(case.v, float("nan")) for _ in range(3)]
    extra: dict[str, Any] = {"cu_seqlens": case.cu_seqlens}
    if operator == "chunk":
        extra = {
            "step_plan": build_step_plan(case.cu_seqlens, case.q.shape[1]),
            "scratch": Scratch(device),
        }

    def call(i: int) -> None:
        run = getattr(kernels, operator)
        run(case, state_pool=pools[i], state_indices=indices, out=outs[i], **extra)

    call(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(1)  # compiles and grows the scratch
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(2)
    assert outs[2].isnan().all()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits("output", outs[2], outs[0])
    assert_same_bits("states", pools[2][1:-1], pools[0][1:-1])
