"""vLLM's MXFP4 indexer on gfx950, whose pages aiter's kernel reads, through vLLM's own call.

The class that vLLM builds there is imported with stand-ins for what asks the GPU, and for the one
answer of aiter's that it asks for. `test_amd_fp8` has the fp8 indexer.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from backend_core.engines import entry
from dsv4_backend.engines import vllm_rocm
from dsv4_backend.engines.vllm_compressor import FusedCompressor
from tests.dsv4.cases import make_history
from tests.engines.dsv4.vllm.harness import Step, build, engine_config, on_kernels_of
from tests.engines.dsv4.vllm.test_compressor import STEPS_C4, check, serve

entry.vllm.dsv4()

FORMAT = "indexer_mxfp4_tiles"
LAYOUT = "vllm.v1.attention.ops.rocm_paged_mxfp4_indexer"


class Rocm(ModuleType):
    """``vllm.platforms.rocm``, whose own import needs the GPU's driver."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return False if name.startswith("_ON_") else lambda *args, **options: False


@pytest.fixture
def aiters(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of vLLM's compressor; aiter names the tiles that it has for 32 heads or more."""
    module, name = vllm_rocm._AITERS
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", Rocm("vllm.platforms.rocm"))
    try:
        kind = getattr(importlib.import_module(module), name, None)
    finally:
        monkeypatch.delitem(sys.modules, module, raising=False)
    if kind is None:
        pytest.skip("0.32.0 has no such compressor")
    answer(monkeypatch, n_per_tile=32)
    # as on a GPU, where vLLM chooses the size of blocks once the model is built
    config = engine_config(flag=True)
    monkeypatch.setattr(config.cache_config, "block_size", 16)
    return kind


def answer(monkeypatch: pytest.MonkeyPatch, **tiles: int) -> None:
    layout = importlib.import_module(LAYOUT)
    layout.rocm_paged_mxfp4_cache_layout.cache_clear()
    found = {"d_per_tile": 16, "block_kv": 64} | tiles
    module = SimpleNamespace(cache_format=lambda heads, dim, tokens: found)
    monkeypatch.setattr(layout, "_aiter", lambda: module)


@pytest.mark.parametrize("part", ["cpu", "MI355X"])
def test_the_engines_steps_give_the_definitions_state_and_records(
    aiters: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    if part != "cpu":
        on_kernels_of(monkeypatch, part)
    config = engine_config(flag=True)
    ours = build(config, FORMAT, cls=aiters)
    assert type(ours) is FusedCompressor and ours.cache_format == FORMAT
    step = Step(ours, FORMAT, [12, 17, 8])
    check(step, serve(step, STEPS_C4, config))


@pytest.mark.parametrize(
    ("n_per_tile", "reason"),
    [
        (16, "aiter's MXFP4 pages must have tiles of (32, 16, 2), got (16, 16, 4)"),
        (0, "aiter does not say how its MXFP4 pages lie"),
    ],
)
def test_other_tiles_stay_upstreams(
    aiters: Any,
    monkeypatch: pytest.MonkeyPatch,
    log_lines: list[str],
    n_per_tile: int,
    reason: str,
) -> None:
    answer(monkeypatch, n_per_tile=n_per_tile)
    assert type(build(engine_config(flag=True), FORMAT, cls=aiters)) is aiters
    assert any(reason in line for line in log_lines)


def test_caches_that_cannot_be_served_end_the_engine(aiters: Any) -> None:
    """Upstream's class would need memory that nobody has reserved."""
    config = engine_config(flag=True)
    step = Step(build(config, FORMAT, cls=aiters), FORMAT, [12])
    cache = step.compressor._static_forward_context["layer"]
    cache.kv_cache = cache.kv_cache[:, :, 1:]
    with pytest.raises(ValueError, match="cache must have pages aligned to 4 bytes"):
        step.run(config, [make_history(step.layer.spec, 12, 0)], [(0, 0, 7)])
    assert step.caches.state.isnan().all()
