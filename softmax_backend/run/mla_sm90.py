"""MLA decode on Hopper in CUDA C++: the main kernel over the work list, then combine."""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend_core.tables.schema import KernelPath
from softmax_backend import combine
from softmax_backend.contract.mla_decode import MlaInputs
from softmax_backend.scratch import Scratch
from softmax_backend.spec import LATENT_DIM

if TYPE_CHECKING:
    from backend_core.launch.cuda import CudaKernel

SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "mla_decode.cu"
THREADS = 384
_PARAMS = struct.Struct("=512s13Q4qf9i16x")  # struct Params of the source
_MAX_SHARED = 227 << 10
_BOX = 64
_PIECE = 16
_PROMOTE_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


def decode(path: KernelPath, x: MlaInputs, scratch: Scratch, pdl_prefetch_safe: bool) -> None:
    """Two launches: partial outputs or, where a tile has one split, the output; then the merge.

    Both are placed while the kernel before runs, and wait for it.
    """
    prefix = x.plan.prefix
    rows = 64 if prefix is not None else x.spec.query_rows
    partial_out, partial_lse = scratch.reserve(x.plan.num_slots, rows, LATENT_DIM)
    tiles = 1 if prefix is not None else -(-rows // 64)
    page_size = x.kv_latent.shape[1]
    params = _PARAMS.pack(
        _maps(x.kv_latent) + _maps(x.kv_rope),
        x.q_latent.data_ptr(),
        x.q_rope.data_ptr(),
        x.out.data_ptr(),
        x.lse.data_ptr(),
        partial_out.data_ptr(),
        partial_lse.data_ptr(),
        x.plan.lengths.data_ptr(),
        x.block_table.data_ptr(),
        x.plan.work.data_ptr(),
        x.plan.num_splits.data_ptr(),
        0 if prefix is None else prefix.tiles.data_ptr(),
        0 if prefix is None else prefix.members.data_ptr(),
        0 if x.sinks is None else x.sinks.data_ptr(),
        x.q_latent.stride(1),
        x.q_latent.stride(2),
        x.q_rope.stride(1),
        x.q_rope.stride(2),
        x.scale,
        x.block_table.stride(0),
        page_size,
        x.spec.num_heads,
        x.spec.query_tokens,
        rows,
        x.causal and x.spec.query_tokens > 1,
        x.plan.chunk_blocks,
        pdl_prefetch_safe,
        tiles,
    )
    once = path.params.evict_first and prefix is None and tiles == 1
    kernel = _kernel(min(rows, 64), once)
    kernel(x.plan.num_ctas * tiles, THREADS, params, overlaps=True)
    combine.combine_sm90(x, partial_out, partial_lse)


def defines(rows: int, evict_first: bool) -> dict[str, int]:
    """Preprocessor constants for a tile of up to ``rows`` query rows: of shared memory the queries
    take what they need and the ring of keys the rest."""
    size = next(size for size in (8, 16, 32, 64) if size >= rows)
    halves, ropes = {8: (6, 3), 16: (5, 4), 32: (5, 3), 64: (4, 3)}[size]
    shared = (
        9 * size * 128  # queries
        + ropes * 64 * 128  # and probabilities
        + halves * 64 * 512
        + 6 * 64 * 4
        + 8 * (2 * ropes + 5 * halves + 2)
    )
    return {
        "ROWS": size,
        "HALVES": halves,
        "ROPES": ropes,
        "EVICT_FIRST": int(evict_first),
        "SHARED_BYTES": -(-shared // 1024) * 1024,
        "PARAM_BYTES": _PARAMS.size,
    }


@functools.cache
def _kernel(rows: int, evict_first: bool) -> CudaKernel:
    from backend_core.launch.cuda import CudaKernel

    constants = defines(rows, evict_first)
    return CudaKernel(SOURCE, "mla_decode", constants, constants["SHARED_BYTES"])


def _maps(cache: torch.Tensor) -> bytes:
    """Tensor maps of one part of the cache: boxes of 64 rows, and of 16.

    Keyed on all that a map holds: an address is soon another cache's.
    """
    pages, page_size, channels = cache.shape
    stride = cache.stride()
    return _encode(cache.data_ptr(), pages, page_size, channels, stride[0], stride[1])


@functools.lru_cache(maxsize=1024)
def _encode(
    address: int, pages: int, page_size: int, channels: int, page_stride: int, row_stride: int
) -> bytes:
    return b"".join(
        _tensor_map(address, (channels, page_size, pages), (row_stride, page_stride), rows)
        for rows in (min(_BOX, page_size), _PIECE)
    )


def _tensor_map(
    address: int, extents: tuple[int, int, int], strides: tuple[int, int], rows: int
) -> bytes:
    """CUtensorMap of bf16 ``[pages, rows, channels]``, innermost first; strides in elements."""
    buffer = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(buffer) + 63) // 64 * 64
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    bf16, no_interleave, swizzle_128b, no_fill = 9, 0, 3, 0
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), bf16, 3, ctypes.c_void_p(address), (u64 * 3)(*extents),
        (u64 * 2)(*(2 * stride for stride in strides)), (u32 * 3)(64, rows, 1),
        (u32 * 3)(1, 1, 1), no_interleave, swizzle_128b, _PROMOTE_128B, no_fill,
    )  # fmt: skip
    if status:
        raise ValueError(
            f"the cache must be one that TMA can read (address a multiple of 16 bytes, strides"
            f" too), got address {address:#x}, extents {extents}, strides {strides}"
        )
    return ctypes.string_at(at, 128)
