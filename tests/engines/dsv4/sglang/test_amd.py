"""The record formats that sglang keeps on AMD GPUs, through its own call and in its own pools.

What tells sglang that it runs there is set by hand; its pools, plans and calls are its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsa.utils import INDEXER_K_CACHE_PRESHUFFLE_TILE
from sglang.srt.layers.attention.dsv4 import compressor_v2, indexer
from sglang.srt.mem_cache import deepseek_v4_memory_pool

from backend_core.target import KNOWN_TARGETS
from dsv4_backend import reference, torch_step
from dsv4_backend import step as dsv4_step
from dsv4_backend.engines import sglang_compressor
from tests.dsv4.cases import POISON, make_spec
from tests.engines.dsv4.sglang.harness import Served, real_pool
from tests.engines.dsv4.sglang.test_step import check_steps, no_stock  # noqa: F401

# where a release asks for `SGLANG_DSV4_UNIFIED_KV_FP8`, newest first
UNIFIED_GATES = (
    "sglang.srt.layers.attention.dsv4.unified_kv_gate",
    "sglang.kernels.ops.attention.dsv4.unified_kv_kernels.env_gate",
)
# where a release has its writer of MXFP4 in planes, newest first
PLANE_WRITERS = (
    "sglang.kernels.ops.kvcache.dsv4_fp4_index_k_cache_hip",
    "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip",
)
FORMATS = [
    ("indexer_fp8_tiles", 4),
    ("indexer_mxfp4_planes", 4),
    ("fp8_two_pools", 4),
    ("fp8_two_pools", 128),
]


def be_amd(monkeypatch: pytest.MonkeyPatch, cache_format: str) -> None:
    """What sglang finds on an MI355X whose records have this format."""
    if cache_format == "indexer_fp8_tiles":
        monkeypatch.setattr(sglang_compressor, "aiter_can_use_preshuffle_paged_mqa", lambda: True)
        monkeypatch.setenv("SGLANG_OPT_USE_AITER_INDEXER", "1")  # which sglang does on HIP
        monkeypatch.delenv("SGLANG_OPT_USE_TILELANG_INDEXER", raising=False)
    elif cache_format == "indexer_mxfp4_planes":
        for module in (compressor_v2, deepseek_v4_memory_pool):
            monkeypatch.setattr(module, "_is_hip", True)
        pool = deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool
        # --enable-deepseek-v4-fp4-indexer
        make = functools.partialmethod(pool._make_indexer_pool, force_fp4=True)
        monkeypatch.setattr(pool, "_make_indexer_pool", make)
    else:
        gate = importlib.import_module(next(filter(importlib.util.find_spec, UNIFIED_GATES)))
        for name in ("is_unified_kv_triton", "is_unified_kv_fp8"):
            monkeypatch.setattr(gate, name, lambda: True)


def served_in_its_pool(cache_format: str, ratio: int) -> Served:
    page_tokens = 1 if cache_format == "fp8_two_pools" else 64
    lengths = [33, 30] if ratio == 4 else [257, 129]
    served = Served(cache_format, ratio, lengths, page_tokens=page_tokens)
    served.compressor.fp4_cos = served.compressor.fp4_sin = None  # bf16 tables; ours are fp32
    served.use(real_pool())
    return served


@pytest.mark.parametrize(("cache_format", "ratio"), FORMATS)
def test_records_are_the_definitions(
    no_stock: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    cache_format: str,
    ratio: int,
) -> None:
    be_amd(monkeypatch, cache_format)
    check_steps(served_in_its_pool(cache_format, ratio))


@pytest.mark.parametrize(("cache_format", "ratio"), FORMATS[:3])
def test_the_gpus_kernels_give_the_same_through_the_interpreter(
    no_stock: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    cache_format: str,
    ratio: int,
) -> None:
    be_amd(monkeypatch, cache_format)
    for module in (dsv4_step, sglang_compressor):
        monkeypatch.setattr(module, "detect_target", lambda device: KNOWN_TARGETS["MI355X"])
    monkeypatch.setattr(torch_step, "step", None)
    check_steps(served_in_its_pool(cache_format, ratio))


def test_sglangs_own_kernel_puts_codes_in_the_same_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its Triton writer of these pages, on rows whose codes need no rounding."""
    writer = importlib.import_module("sglang.kernels.ops.kvcache.triton_store_cache")
    monkeypatch.setattr(writer, "aiter_can_use_preshuffle_paged_mqa", lambda: True)
    spec = Served("indexer_fp8_tiles", page_tokens=64).engine.spec
    rng = torch.Generator().manual_seed(3)
    rows = 2.0 ** torch.randint(-3, 9, (70, 128), generator=rng)
    rows[:, 5] = 448.0  # so that the scale is 1
    slots = torch.randperm(128, generator=rng)[:70]
    theirs, ours = (torch.full((2, spec.page_bytes), POISON, dtype=torch.uint8) for _ in range(2))
    writer.triton_fused_store_indexer(rows, theirs, slots, 64)
    reference.store([ours], slots, spec, *reference.quantise(rows.double(), spec))
    assert spec.record.tile_tokens == INDEXER_K_CACHE_PRESHUFFLE_TILE
    assert torch.equal(ours, theirs)


def test_sglangs_own_kernel_puts_codes_in_the_same_planes() -> None:
    """The same with its Triton writer of aiter's MXFP4 pages."""
    writer = importlib.import_module(next(filter(importlib.util.find_spec, PLANE_WRITERS)))
    spec = make_spec("indexer_mxfp4_planes", rounding="aiter")
    rng = torch.Generator().manual_seed(4)
    codes = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0])
    rows = codes[torch.randint(12, (70, 128), generator=rng)]
    rows[:, 7::32] = 6.0
    rows *= 2.0 ** torch.randint(-3, 4, (70, 4), generator=rng).repeat_interleave(32, 1)
    slots = torch.randperm(128, generator=rng)[:70]
    caches = [
        [torch.full((2, size), POISON, dtype=torch.uint8) for size in (64 * 64, 64 * 4)]
        for _ in range(2)
    ]
    payload, scales = caches[0]
    writer.store_fp4_index_k_cache_split(
        rows.bfloat16(),
        payload.view(torch.int8).view(2, 1, 4, 64, 16),
        scales.view(2, 1, 4, 64),
        slots,
        page_size=64,
    )
    reference.store(caches[1], slots, spec, *reference.quantise(rows.double(), spec))
    assert all(map(torch.equal, *caches))


def test_tilelangs_indexer_finds_flat_pages(
    no_stock: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes before aiter's, and takes pages as sglang's reader in torch does, which runs here."""
    be_amd(monkeypatch, "indexer_fp8_tiles")
    monkeypatch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "1")
    served = served_in_its_pool("indexer_fp8", 4)
    check_steps(served)
    engine = served.engine
    pages = len(engine.cache)
    rng = torch.Generator().manual_seed(6)
    q = torch.randn(1, 1, 16, 128, generator=rng).to(indexer.FP8_DTYPE)
    weights = torch.rand(1, 16, generator=rng)
    logits = indexer.fp8_paged_mqa_logits_torch(
        q,
        engine.cache.view(pages, 64, 1, 132),
        weights,
        torch.tensor([64 * pages]),
        torch.arange(pages)[None],
        None,
        64 * pages,
        clean_logits=False,
    )
    slots = torch.cat([engine.slot_of[r, : n // 4] for r, n in enumerate(engine.lengths)])
    keys = reference.dequantise(*reference.load(engine.caches, slots, engine.spec), engine.spec)
    want = (keys @ q[0, 0].float().T).relu() @ weights[0]
    torch.testing.assert_close(logits[0, slots], want, rtol=0.02, atol=0.2)  # it works in bf16
    assert len(want) == 15


def test_fp4_records_in_one_tensor_stay_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_compressor, "aiter_can_use_preshuffle_paged_mqa", lambda: True)
    call: dict[str, Any] = {
        "compress_ratio": 4,
        "head_dim": 128,
        "kv_score_buffer": torch.zeros(1, 4, 512),
        "use_fp4_indexer": True,
    }
    assert "scales in a tensor of their own" in str(sglang_compressor._unserved(call))


def test_nothing_on_hip_calls_the_kernel_that_the_in_place_operator_replaced() -> None:
    """Where a release still holds it, its one caller is a mixin of no attention backend on HIP."""
    folder = Path(importlib.util.find_spec("sglang").origin).parent
    sources = {path: path.read_text() for path in (folder / "srt").rglob("*.py")}
    name, mixin = "hip_compress_fused_norm_rope_hadamard_inplace", "dsv4/compressor.py"
    callers = [path.as_posix() for path, text in sources.items() if name in text]
    assert all(caller.endswith(mixin) for caller in callers)
    wanted = "from sglang.srt.layers.attention.dsv4.compressor import CompressorBackendMixin"
    users = [path for path, text in sources.items() if wanted in text]
    assert all("npu" in path.parts for path in users)
    backend = sources[folder / "srt/layers/attention/deepseek_v4_backend_hip_radix.py"]
    assert "from sglang.srt.layers.attention.dsv4.compressor_v2 import" in backend
