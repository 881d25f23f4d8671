"""The flag and the choice: which class serves which model's MLA layers, and what is refused."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from backend_core.engines import entry, seams, vllm_flag
from backend_core.engines.vllm_flag import Request
from backend_core.target import KNOWN_TARGETS
from mla_backend.engines import vllm as adapter
from mla_backend.engines.seam_list import VLLM_DENSE
from mla_backend.engines.vllm_mla import SplitKvMLABackend
from tests.engines.mla.vllm.harness import RECALL, deepseek, engine_config
from tests.engines.vllm_process import cuda_platform

MLA = AttentionSelectorConfig(
    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True
)
FULL = MLA._replace(head_size=128, use_mla=False)
H200 = KNOWN_TARGETS["H200"]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 for the choice, and log lines that come once a test."""
    _first_config()
    importlib.import_module("vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn")
    entry.vllm.mla()
    entry.vllm.kda()
    monkeypatch.setattr(adapter, "detect_target", lambda device: H200)
    yield


@functools.cache
def _first_config() -> None:
    """The first configuration of a process sets vLLM's loggers up anew."""
    engine_config(family=None)


Select = Callable[..., Any]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Select:
    """vLLM's own selection on CUDA, of the class that serves a layer under a configuration.

    The platform is CUDA from the first selection on: a configuration is made on a CPU.
    """

    def selected(config: Any, selector: Any, heads: int, family: str | None) -> Any:
        platform = cuda_platform(monkeypatch)
        member = None if family is None else AttentionBackendEnum[vllm_flag.flag_name(family)]
        with set_current_vllm_config(config):
            path = platform.get_attn_backend_cls(
                member, attn_selector_config=selector, num_heads=heads
            )
        return resolve_obj_by_qualname(path)

    return selected


def chosen(
    config: Any, *, heads: int = 4, upstream: type = FlashAttnMLABackend, **changes: Any
) -> type | str:
    return adapter.choose(Request(config, MLA._replace(**changes), heads, upstream))


@pytest.mark.parametrize("family", ["mla", "kda"])
def test_kimi_linear_is_served_under_either_flag(
    cuda: Select, family: str, log_lines: list[str]
) -> None:
    config = engine_config(RECALL, family)
    assert cuda(config, MLA, 2, family) is SplitKvMLABackend
    served, *rows = log_lines
    assert served == (
        "kda-dsv4-backend: MLA with 2 heads per rank on H200 (sm90): decode steps of any number of"
        " requests are planned, run and combined here, where"
        " benchmarks/results/mla_decode_h200.json has them ahead; others and prefills stay"
        " FLASH_ATTN_MLA's"
    )
    row = "kda-dsv4-backend: mla_decode grid 1 and more: sm90 "
    assert sum(line.startswith(row) for line in rows) == 1
    assert log_lines[-1] == (
        "kda-dsv4-backend: MLA layers are served by mla"
        " (SplitKvMLABackend in the place of FlashAttnMLABackend)"
    )


@pytest.mark.parametrize("version", [2, 3])
def test_deepseek_is_served_under_its_own_flag(cuda: Select, version: int, tmp_path: Path) -> None:
    config = engine_config(deepseek(tmp_path, version))
    assert config.model_config.use_mla
    assert cuda(config, MLA, 4, "mla") is SplitKvMLABackend


def test_the_flag_is_not_for_a_model_without_mla(cuda: Select) -> None:
    config = engine_config(RECALL)
    with pytest.raises(ValueError, match=r"with MLA or DeepSeek-V4 attention layers, of which"):
        cuda(config, FULL, 2, "mla")


def test_without_the_flag_the_layers_are_vllms(cuda: Select) -> None:
    assert cuda(engine_config(RECALL, None), MLA, 2, None) is FlashAttnMLABackend


def test_vllm_knows_the_class_by_its_base() -> None:
    assert SplitKvMLABackend.get_name() == "FLASH_ATTN_MLA"
    assert issubclass(SplitKvMLABackend.get_builder_cls(), FlashAttnMLABackend.get_builder_cls())
    assert issubclass(SplitKvMLABackend.get_impl_cls(), FlashAttnMLABackend.get_impl_cls())
    assert not SplitKvMLABackend.__abstractmethods__


def test_drafts_are_judged_by_their_rows(log_lines: list[str]) -> None:
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = engine_config(speculative_config=draft)
    assert adapter.query_tokens(config) == (1, 4)
    assert chosen(config, heads=4) is SplitKvMLABackend
    served = "steps of up to 4 and of 32 to 128 requests with 4 query tokens each are planned"
    assert any(served in line for line in log_lines)
    log_lines.clear()
    assert chosen(config, heads=16) is SplitKvMLABackend
    assert log_lines[-1].endswith(
        "decode steps with 4 query tokens each stay FLASH_ATTN_MLA's: its decode was compared with"
        " fa3 at up to 32 query rows per request"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"upstream": TritonMLABackend},
            "decode is served in the place of FLASH_ATTN_MLA, and vLLM chooses TRITON_MLA here",
        ),
        (
            {"heads": 64},
            "its decode was compared with fa3 at up to 32 query rows per request",
        ),
        ({"head_size": 320}, "a token of the cache must have 512 + 64 channels, got 320"),
        ({"dtype": torch.float16}, "queries must be in bfloat16, got float16"),
        (
            {"kv_cache_dtype": "fp8"},
            "the cache must be in bfloat16, got fp8: this package reads fp8 caches in Triton alone,"
            " which no result compares with vLLM's kernels",
        ),
        (
            {"has_sink": True},
            "layers with sinks, a sliding window or attention to later tokens are not served",
        ),
        (
            {"use_non_causal": True},
            "layers with sinks, a sliding window or attention to later tokens are not served",
        ),
        *(
            (
                {"ranks": f"{what}_context_parallel_size"},
                f"a request must have its whole cache on one rank, got 2 {what} ranks",
            )
            for what in ("decode", "prefill")
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    config = engine_config()
    if ranks := changes.pop("ranks", None):
        setattr(config.parallel_config, ranks, 2)
    assert chosen(config, **changes) == reason


def test_servers_and_releases_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, reason = engine_config(), f"vllm 0.34.0 does not fit the {VLLM_DENSE.name}"
    with monkeypatch.context() as patch:
        patch.setattr(seams, "refusal", {VLLM_DENSE: reason}.get)
        assert chosen(config) == reason
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert chosen(config) == "VLLM_BATCH_INVARIANT is set, and plans change with the batch"
