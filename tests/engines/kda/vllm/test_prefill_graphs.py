"""The sizes of prefill steps that vLLM captures with the flag alone."""

from __future__ import annotations

import os
import pickle
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_backend.engines import prefill_graphs, vllm_graphs
from tests.engines.kda.vllm.harness import NGRAM, engine_config
from tests.engines.vllm_process import cuda_platform

LENGTHS = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
_ALONE = {"is_first_rank": True, "is_last_rank": True}
OF_VLLM = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_platform(monkeypatch)
    # vLLM turns them on by itself for the checkpoint's architecture, and keeps that in the process
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"})
    monkeypatch.setattr(prefill_graphs, "HIDDEN_SIZE", 256)  # the checkpoint's


def sizes(*, flag: bool = True, **options: Any) -> list[int]:
    config = engine_config(flag=flag, enforce_eager=False, **{**LENGTHS, **options})
    found: list[int] = config.compilation_config.cudagraph_capture_sizes
    assert config.compilation_config.max_cudagraph_capture_size == max(found, default=0)
    return found


def has_second_runner(**options: Any) -> bool:
    """Whether this release runs such a server by the model runner whose graphs are changed."""
    config = engine_config(flag=False, enforce_eager=False, **{**LENGTHS, **options})
    return bool(config.use_v2_model_runner)


def test_steps_are_captured_up_to_where_a_gpus_work_hides_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(vllm_graphs, "say", said.append)
    assert sizes(flag=False) == OF_VLLM
    assert sizes() == [*OF_VLLM, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    (line,) = said
    assert "prefill steps of up to 2048 tokens run in CUDA graphs, 8 sizes more" in line


def test_the_ranks_share_the_work_and_a_step_bounds_the_sizes() -> None:
    assert prefill_graphs.most_tokens(256, 4, 8192) == 8192
    assert prefill_graphs.most_tokens(512, 4, 8192) == 2048  # four times the work of a layer
    assert prefill_graphs.most_tokens(256, 4, 6000) == 6000
    # 16,384 tokens of work of a rank's share, three ninths of it: no size between two of the list
    assert prefill_graphs.most_tokens(768, 8, 8192) == 1792
    assert prefill_graphs.most_tokens(25600, 1, 8192) == 8
    for most in (100, 512, 2048, 6000, 8192):
        found = prefill_graphs.sizes(most)
        assert found[-1] == most and found == sorted(set(found))
        # a step is padded to less than twice its tokens, and by at most 512
        assert all(b - a <= min(a, 512) for a, b in pairwise(found))


def test_few_sequences_leave_no_hole_between_the_sizes() -> None:
    found = sizes(max_num_seqs=4)
    assert found[:4] == sizes(flag=False, max_num_seqs=4) == [1, 2, 4, 8]
    assert found[4:] == [size for size in prefill_graphs.SIZES if 8 < size <= 2048]


@pytest.mark.parametrize(
    "said",
    [
        {"enforce_eager": True},
        {"cudagraph_capture_sizes": [1, 2, 4, 256]},
        {"max_cudagraph_capture_size": 128},
        {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
        {"compilation_config": {"cudagraph_mode": "NONE"}},
        {"pipeline_parallel_size": 2},
        {"max_num_batched_tokens": 512, "max_num_seqs": 512},
    ],
    ids=lambda said: next(iter(said)),
)
def test_what_the_user_says_stays(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.parallel import ParallelConfig

    if "pipeline_parallel_size" in said:  # which asks how many GPUs there are
        monkeypatch.setattr(ParallelConfig, "_verify_args", lambda self: self, raising=False)
    eager = {"enforce_eager": said.get("enforce_eager", False)}

    def resolved(flag: bool) -> list[int]:
        config = engine_config(flag=flag, **{**LENGTHS, **said, **eager})
        found: list[int] = config.compilation_config.cudagraph_capture_sizes
        return found

    assert resolved(True) == resolved(False)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 2048},
        {"speculative_config": NGRAM},
    ],
    ids=["prefix cache", "chunked prompts", "drafts"],
)
def test_these_servers_are_served_too(options: dict[str, Any]) -> None:
    if not has_second_runner(**options):
        assert sizes(**options) == sizes(flag=False, **options)
        pytest.skip("this release serves them by its first model runner")
    assert sizes(**options)[-1] == 2048


def test_a_server_with_lora_keeps_vllms_sizes() -> None:
    config = engine_config(flag=True, enforce_eager=False, **LENGTHS)
    assert vllm_graphs.refusal(config) is None
    config.lora_config = object()
    assert "LoRA" in str(vllm_graphs.refusal(config))


def test_without_breakable_graphs_the_sizes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    assert sizes() == OF_VLLM


def test_a_release_whose_graphs_are_others_keeps_its_sizes(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(vllm_graphs.seams, "refusal", lambda part: f"no {part.name}")
    assert sizes() == OF_VLLM
    assert "keep vLLM's sizes: no prefill graphs" in log_lines[0]


@pytest.mark.parametrize("more", [{}, {"speculative_config": NGRAM}], ids=["", "drafts"])
def test_graphs_of_decodes_stay_what_they_are(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their attention keeps memory for each token of the largest."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    if not has_second_runner(**more):
        pytest.skip("this release serves drafts by its first model runner")
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(**_ALONE))
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)
    tokens = 1 + len(more) * NGRAM["num_speculative_tokens"]

    def manager(flag: bool) -> Any:
        # as a worker has it, which unpickles its configuration
        config = pickle.loads(
            pickle.dumps(engine_config(flag=flag, enforce_eager=False, **LENGTHS, **more))
        )
        mode = config.compilation_config.cudagraph_mode
        return cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, tokens)

    upstream, ours = manager(False), manager(True)
    full, mixed = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    assert ours._capture_descs[full] == upstream._capture_descs[full]
    sizes = [one.num_tokens for one in ours._capture_descs[mixed]]
    assert max(sizes) == 2048 and len(sizes) > len(upstream._capture_descs[mixed])
    for manager_, most in ((upstream, None), (ours, 640)):
        manager_._graphs_captured = True
        requests = 600 // tokens  # more tokens than a graph of decodes has
        found = manager_.dispatch(requests, requests * tokens, tokens, 0)
        assert found.cg_mode == (mixed if most else CUDAGraphMode.NONE)
    small = [one.dispatch(64, 64 * tokens, tokens, 0) for one in (upstream, ours)]
    assert small[0] == small[1] and small[0].cg_mode == full
