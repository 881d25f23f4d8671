"""MLA decode by FlashMLA, FlashAttention-3, FlashInfer and vLLM, as their engines call them.

Each peer is a function from a case to the calls that a graph holds, one per page table. Its plan is
made before, as an engine makes it once per step. The libraries lie in one folder:

    flash_mla/_C_legacy.abi3.so     of the wheel sgl-flash-mla 1.0.0
    _vllm_fa3_C.abi3.so             of the wheel vllm 0.33.0, vllm_flash_attn/
    fi_mla_sm90.so                  FlashInfer 0.7.2's csrc/batch_mla_sm90_{plan,run,binding}.cu,
                                    bf16 and int32, built with nvcc for sm_90a
    site/                           the wheel apache-tvm-ffi, unpacked
    triton_decode_attention.py      of vllm 0.33.0, v1/attention/ops/
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from benchmarks.peers.sources import stub

Call = Callable[[], object]
FA3_SPLITS = 32
"""Splits that vLLM captures FA3 with (flash_attn_max_num_splits_for_cuda_graph)."""


class Case(Protocol):
    """A peer's inputs of a case; ``result`` receives (output, LSE)."""

    heads: int
    page_size: int
    scale: float
    sizes: list[int]
    lengths: torch.Tensor
    q: torch.Tensor
    cache: torch.Tensor
    tables: list[torch.Tensor]
    pages: list[torch.Tensor]
    result: tuple[torch.Tensor, ...]


Peer = Callable[[Any], list[Call]]


def load_peers(folder: Path) -> dict[str, Peer]:
    """The peers that load, by name; says of the others why they do not."""
    sys.path.insert(0, str(folder / "site"))
    peers: dict[str, Peer] = {}
    loaders: dict[str, Callable[[Path], Peer]] = {
        "flashmla": _load_flashmla,
        "fa3": _load_fa3,
        "flashinfer": _load_flashinfer,
        "vllm_triton": _load_vllm_triton,
    }
    for name, load in loaders.items():
        try:
            peers[name] = load(folder)
        except (OSError, ImportError, RuntimeError) as error:
            print(f"{name} is left out: {error}", flush=True)
    return peers


def _load_flashmla(folder: Path) -> Peer:
    torch.ops.load_library(str(folder / "flash_mla" / "_C_legacy.abi3.so"))
    ops = torch.ops.flash_mla_legacy

    def make(x: Case) -> list[Call]:
        q = x.q.unsqueeze(1)
        cache = x.cache.unsqueeze(2)
        plan = ops.dense_decode_fwd(
            q, cache, 512, x.lengths, x.tables[0], x.scale, True, None, None
        )[2:4]

        def call(table: torch.Tensor) -> None:
            x.result = ops.dense_decode_fwd(q, cache, 512, x.lengths, table, x.scale, True, *plan)[
                :2
            ]

        return [functools.partial(call, table) for table in x.tables]

    return make


def flashmla_plan(lengths: torch.Tensor, heads: int) -> Callable[[], list[torch.Tensor]]:
    """FlashMLA's planner on its own; a call gives (tile_scheduler_metadata, num_splits)."""
    ops = torch.ops.flash_mla_legacy
    return lambda: ops.get_mla_decoding_metadata(lengths, heads, 1, None, False, None)


def _load_fa3(folder: Path) -> Peer:
    torch.ops.load_library(str(folder / "_vllm_fa3_C.abi3.so"))
    ops = torch.ops._vllm_fa3_C

    def make(x: Case) -> list[Call]:
        requests, longest = len(x.sizes), max(x.sizes)
        cu_seqlens = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        k, v = x.cache[..., 512:].unsqueeze(2), x.cache[..., :512].unsqueeze(2)
        sizes = (requests, 1, longest, x.heads, 1, 64, 512, torch.bfloat16, x.lengths, cu_seqlens)
        modes = (x.page_size, 0, True, -1, -1, False, FA3_SPLITS, None, 0)
        plan = ops.get_scheduler_metadata(*sizes, *(None,) * 4, *modes)
        q, qv = x.q[..., 512:].contiguous(), x.q[..., :512].contiguous()

        def call(table: torch.Tensor) -> None:
            tensors = (q, k, v, None, None, qv, None, cu_seqlens, None, None, None, x.lengths)
            paged = (1, longest, table, *(None,) * 8)
            modes = (x.scale, True, -1, -1, 0.0, True, plan, FA3_SPLITS, None, 0, None, 1, 0, None)
            x.result = ops.fwd(*tensors, *paged, *modes)[:2]

        return [functools.partial(call, table) for table in x.tables]

    return make


def _load_flashinfer(folder: Path) -> Peer:
    import tvm_ffi

    module = tvm_ffi.load_module(str(folder / "fi_mla_sm90.so"))
    floats = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    ints = torch.empty(16 << 20, dtype=torch.int8, device="cuda")
    pinned = torch.empty(16 << 20, dtype=torch.int8, pin_memory=True)

    def make(x: Case) -> list[Call]:
        requests = len(x.sizes)
        qo_indptr = torch.arange(requests + 1, dtype=torch.int32)
        need = [0, *(-(-n // x.page_size) for n in x.sizes)]
        kv_indptr = torch.tensor(need, dtype=torch.int32).cumsum(0).int()
        lengths = torch.tensor(x.sizes, dtype=torch.int32)
        with tvm_ffi.use_torch_stream():
            plan, staged = module.plan(
                floats, ints, pinned, qo_indptr, kv_indptr, lengths, x.heads, 512, False
            )
        ints[:staged].copy_(pinned[:staged])
        out = torch.empty(requests, x.heads, 512, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(requests, x.heads, device="cuda")
        q_latent, q_rope = x.q[..., :512], x.q[..., 512:]
        latent, rope = x.cache[..., :512], x.cache[..., 512:]
        x.result = (out, lse)

        def call(pages: torch.Tensor) -> None:
            with tvm_ffi.use_torch_stream():
                tensors = (q_latent, q_rope, latent, rope, pages, out, lse)
                sizes = (0, x.heads, x.page_size, x.scale, True, 1.0, 1.0, None)
                module.run(floats, ints, plan, *tensors, *sizes)

        return [functools.partial(call, pages) for pages in x.pages]

    return make


def _load_vllm_triton(folder: Path) -> Peer:
    from triton import language

    platform = types.SimpleNamespace(
        is_rocm=lambda: False, is_cuda=lambda: True, is_xpu=lambda: False,
        get_device_capability=lambda *_: types.SimpleNamespace(major=9, minor=0),
        num_compute_units=lambda *_: 132,
    )  # fmt: skip
    said = types.SimpleNamespace(debug=print, info=print, warning=print, warning_once=print)
    stub("vllm")
    stub("vllm.platforms", current_platform=platform)
    stub("vllm.triton_utils", tl=language, triton=triton)
    stub("vllm.logger", init_logger=lambda *_: said)
    file = folder / "triton_decode_attention.py"
    spec = importlib.util.spec_from_file_location("vllm_triton_mla", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ops)

    def make(x: Case) -> list[Call]:
        requests, longest = len(x.sizes), max(x.sizes)
        splits = min(triton.next_power_of_2(max(1, longest // 512)), 264)
        logits = torch.empty(requests, x.heads, splits, 513, device="cuda")
        out = torch.empty(requests, x.heads, 512, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(requests, x.heads, device="cuda")
        one = torch.ones((), device="cuda")
        kv = x.cache.unsqueeze(2)
        x.result = (out, lse)

        def call(table: torch.Tensor) -> None:
            ops.decode_attention_fwd(
                x.q, kv, kv[..., :512], out, lse, table, x.lengths, logits, splits, x.scale,
                x.page_size, k_scale=one, v_scale=one, is_mla=True,
            )  # fmt: skip

        return [functools.partial(call, table) for table in x.tables]

    return make
