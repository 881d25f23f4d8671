"""Servers on eight ranks, one of which this process pretends to be: 4 heads of Kimi-Linear, 8 of
GLM-5.3-Flash, 12 of Kimi-K3."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state

from backend_core.engines import seams
from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS
from kda_backend.engines import vllm_layer, vllm_profile
from kda_backend.engines.prefill_calls import PARTIAL_CHUNKS
from kda_backend.engines.vllm_seams import VLLM_RECORDS
from kda_backend.engines.vllm_tables import StepTables
from kda_backend.layer import Projections
from kda_backend.prefill.two_stage import tile_elements
from kda_backend.spec import CHUNK
from tests.engines.kda.vllm import models
from tests.engines.kda.vllm.harness import DRAFT, NGRAM, engine_config, run_layer
from tests.engines.kda.vllm.models import MODELS, build
from tests.engines.kda.weights import DIM
from tests.engines.vllm_process import cuda_platform

RANKS, TOKENS, SEQUENCES = 8, 8192, 1024


@dataclass(frozen=True)
class Server:
    """Sizes of a model, and what follows from them on eight H200s.

    Attributes:
        most: tokens of the largest prefill graph.
        one, two: the path of one prompt of `TOKENS` tokens, and of two of half as many.
        records: three drafted tokens are kept as records without being asked for.
    """

    heads: int
    hidden_size: int
    lower_bound: float | None
    most: int
    one: str
    two: str
    records: bool

    def config(self, **options: Any) -> Any:
        """vLLM's."""
        sizes = {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "hidden_size": self.hidden_size,
        }
        return engine_config(
            flag=True,
            hf_overrides=sizes,
            tensor_parallel_size=RANKS,
            distributed_executor_backend="mp",
            **{"max_num_batched_tokens": TOKENS, "max_num_seqs": SEQUENCES, **options},
        )


SERVERS = {
    "Kimi-Linear": Server(32, 2304, None, 8192, "segmented_sm90", "segmented_sm90", True),
    "GLM-5.3-Flash": Server(64, 4096, -5.0, 5120, "segmented_sm90", "two_stage_sm90", True),
    "Kimi-K3": Server(96, 7168, -5.0, 1536, "two_stage_sm90", "two_stage_sm90", False),
}


@pytest.fixture(params=SERVERS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def layer_of(name: str, config: Any, monkeypatch: pytest.MonkeyPatch, gpu: str) -> Any:
    """A layer of the model, as the fourth of eight ranks builds it on such GPUs."""
    group, server = parallel_state.get_tp_group(), SERVERS[name]
    monkeypatch.setattr(group, "world_size", RANKS)
    monkeypatch.setattr(group, "rank_in_group", 3)
    monkeypatch.setattr(group, "all_reduce", lambda x: x)
    monkeypatch.setattr(models, "HEADS", server.heads)
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS[gpu])
    monkeypatch.setattr(vllm_layer, "begin_to_compile", lambda *_: [])
    vllm_layer._runtime.cache_clear()
    return build(MODELS[name], config, server.lower_bound)


def test_graphs_reach_as_far_as_the_work_of_a_rank_hides_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_platform(monkeypatch)
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"})
    config = SERVERS[name].config(enforce_eager=False)
    assert config.compilation_config.max_cudagraph_capture_size == SERVERS[name].most


def test_a_rank_has_the_paths_of_its_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SERVERS[name]
    layer = layer_of(name, server.config(speculative_config=NGRAM), monkeypatch, "H200")
    runtime, heads = layer.kda_runtime, server.heads // RANKS
    paths = runtime.selection
    assert paths.shape.num_value_heads == heads
    grid = TOKENS // CHUNK * heads
    assert paths.prefill.row(grid, TOKENS).name == server.one
    assert paths.prefill.row(grid, TOKENS // 2).name == server.two
    for number in (1, 64, SEQUENCES):
        assert paths.decode_step.row(number * heads).name == "fused_sm90"
        assert paths.verify_records.row(number * heads).name == "fused_sm90"
    assert StepTables(runtime, torch.device("cpu")).rows == {4: 256, 8: 128, 12: 85}[heads]
    records = layer.recoverssm_records
    served = seams.difference(VLLM_RECORDS) is None  # in this release
    assert (records is not None) == (server.records and served)
    if records is not None:
        assert records.correction.shape == (SEQUENCES, heads, DRAFT, DIM)


def test_scratch_memory_is_that_of_a_ranks_heads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Triton's kernels serve. No kernel runs."""
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda *_: None)
    config = SERVERS[name].config()
    layer = layer_of(name, config, monkeypatch, "A100")
    given: list[Any] = []
    monkeypatch.setattr(vllm_layer, "profile", lambda *of_layer: given.extend(of_layer))
    run_layer(layer, config, torch.zeros(1, 256), None)
    _, weights, one = given
    x = Projections(*(tensor.new_empty(TOKENS, *tensor.shape[1:]) for tensor in one))
    vllm_profile._warm.clear()
    with torch.no_grad():
        vllm_profile.profile(layer, weights, x)
    tiles = (TOKENS // CHUNK + PARTIAL_CHUNKS) * SERVERS[name].heads // RANKS
    fewest = tiles * (tile_elements(DIM, DIM) * 2 + DIM * 4)
    assert fewest <= layer.kda_runtime.scratch.nbytes < fewest + 2**16
