"""Servers on eight ranks, one of which this process pretends to be: 4 heads of Kimi-Linear, 8 of
GLM-5.3-Flash, 12 of Kimi-K3."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed import parallel_state

from backend_core.engines import seams
from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.numerics import relative_error
from benchmarks.recall.widen import widen
from kda_backend.engines import vllm_layer, vllm_profile
from kda_backend.engines.prefill_calls import PARTIAL_CHUNKS
from kda_backend.engines.vllm_seams import K3_RECORDS, VLLM_RECORDS
from kda_backend.engines.vllm_tables import StepTables
from kda_backend.layer import Projections
from kda_backend.prefill.two_stage import tile_elements
from kda_backend.spec import CHUNK
from tests.engines.kda.vllm import models
from tests.engines.kda.vllm.harness import (
    DRAFT,
    NGRAM,
    bind_cache,
    build_layer,
    engine_config,
    hidden,
    run_layer,
    step_metadata,
)
from tests.engines.kda.vllm.models import MODELS, build
from tests.engines.kda.weights import CHECKPOINT, DIM
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


@pytest.fixture(autouse=True)
def no_runtime_stays() -> Iterator[None]:
    vllm_layer._runtime.cache_clear()
    vllm_profile._warm.clear()
    yield
    vllm_layer._runtime.cache_clear()


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight, over which nothing is summed."""
    group = parallel_state.get_tp_group()
    monkeypatch.setattr(group, "world_size", RANKS)
    monkeypatch.setattr(group, "rank_in_group", rank)
    monkeypatch.setattr(group, "all_reduce", lambda x: x)


def layer_of(name: str, config: Any, monkeypatch: pytest.MonkeyPatch, gpu: str) -> Any:
    """A layer of the model, as the fourth of eight ranks builds it on such GPUs."""
    be_rank(3, monkeypatch)
    monkeypatch.setattr(models, "HEADS", SERVERS[name].heads)
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS[gpu])
    monkeypatch.setattr(vllm_layer, "begin_to_compile", lambda *_: [])
    return build(MODELS[name], config, SERVERS[name].lower_bound)


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


def test_kimi_k3s_own_records_are_verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM allocates them under --use-replayssm."""
    if seams.difference(K3_RECORDS) is not None:
        pytest.skip("this release is not served")
    config = SERVERS["Kimi-K3"].config(speculative_config=NGRAM)
    config.cache_config.use_replayssm = config.cache_config.use_kda_recoverssm = True
    layer = layer_of("Kimi-K3", config, monkeypatch, "H200")
    assert layer.kda_runtime.selection.shape.num_value_heads == 12
    assert layer.recoverssm_records.correction.shape == (SEQUENCES, 12, DRAFT, DIM)


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
    with torch.no_grad():
        vllm_profile.profile(layer, weights, x)
    tiles = (TOKENS // CHUNK + PARTIAL_CHUNKS) * SERVERS[name].heads // RANKS
    fewest = tiles * (tile_elements(DIM, DIM) * 2 + DIM * 4)
    assert fewest <= layer.kda_runtime.scratch.nbytes < fewest + 2**16


def test_ranks_of_the_widened_checkpoint_make_up_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recall over eight GPUs asks a checkpoint whose two heads have four copies each."""
    x, metadata = hidden(40), ((40,), (0,), torch.ones(1, 4, dtype=torch.int32))

    def prefilled(config: Any, weights: Any) -> torch.Tensor:
        layer = build_layer(config, weights=weights)
        bind_cache(layer, config)
        return run_layer(layer, config, x, step_metadata(layer, config, *metadata))

    want = prefilled(engine_config(flag=True), None)
    widen(CHECKPOINT, tmp_path / "wide", RANKS)
    text = json.loads((tmp_path / "wide" / "config.json").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "linear_attn_config")
    config = engine_config(
        flag=True,
        hf_overrides={name: text[name] for name in names},
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
    )
    prefix, file = "model.layers.0.self_attn.", load_file(tmp_path / "wide" / "model.safetensors")
    weights = {n.removeprefix(prefix): w for n, w in file.items() if n.startswith(prefix)}
    found = torch.zeros_like(want)
    for rank in range(RANKS):
        be_rank(rank, monkeypatch)
        config.compilation_config.static_forward_context.clear()
        found += prefilled(config, weights)
    assert relative_error(found, want) < 2e-2
