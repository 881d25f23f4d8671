"""MLA decode on Hopper in CUDA C++: the main kernel over the work list, then combine."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from backend_core.launch.cuda import CudaKernel, CudaParams
from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from mla_backend import combine
from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.decode import MlaRun
from mla_backend.scratch import SplitScratch
from mla_backend.spec import LATENT_DIM, MlaSpec

SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "mla_decode.cu"
THREADS = 384
TensorMap = tuple[int, ...]
"""The 16 words of a CUtensorMap."""
PARAMS = CudaParams(
    (
        ("latent", "TensorMap"),  # [pages, page rows, 512 channels] bf16; boxes of 64 rows
        ("latent_pieces", "TensorMap"),  # boxes of 16
        ("rope", "TensorMap"),  # [pages, page rows, 64 channels]
        ("rope_pieces", "TensorMap"),
        ("q_latent", "const u16*"),  # [tokens, heads, 512] bf16
        ("q_rope", "const u16*"),  # [tokens, heads, 64]
        ("out", "u16*"),  # [requests, query tokens, heads, 512] bf16
        ("lse", "float*"),  # [requests, query tokens, heads], natural logarithm
        ("partial_out", "float*"),  # [slots, partial_rows, 512]
        ("partial_lse", "float*"),  # [slots, partial_rows], base 2
        ("lengths", "const int*"),  # [requests]
        ("block_table", "const int*"),  # [requests, table_stride]
        ("work", "const int4*"),  # [CTAs, 2]: first tile, first block, last tile, end; first split
        ("num_splits", "const int*"),  # [tiles + 1], a prefix sum: the first slot of each tile
        ("tiles", "const int4*"),  # [tiles, 2] or null: QueryTile
        ("members", "const int*"),  # requests of the tiles, or null
        ("sinks", "const float*"),  # [heads] or null, natural logarithm
        ("stride_q_latent_t", "i64"),
        ("stride_q_latent_h", "i64"),
        ("stride_q_rope_t", "i64"),
        ("stride_q_rope_h", "i64"),
        ("scale", "float"),
        ("table_stride", "int"),
        ("page_size", "int"),
        ("heads", "int"),
        ("query_tokens", "int"),
        ("partial_rows", "int"),
        ("causal", "int"),  # a query token sees what is before it
        ("prefetch_safe", "int"),  # no kernel in flight writes plan, lengths or block table
        ("row_tiles", "int"),  # of 64 rows of a request; CTAs count them fastest
    ),
    {"TensorMap": tuple((f"word_{i}", "u64") for i in range(16))},
)
_ALIGNMENT = bytes(64)  # the kernel's parameter is aligned, hence padded, to 64 bytes
_BOX = 64
_PIECE = 16
PREFIX_ROWS = 64
"""Of a tile of a shared prefix, and of a slot of its partial results."""
_PROMOTE_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


def bind(row: KernelPath, spec: MlaSpec, target: Target) -> MlaRun:
    return decode


def decode(x: MlaInputs, scratch: SplitScratch) -> None:
    """Two launches: partial outputs or, where a tile has one split, the output; then the merge.

    Each is placed while the kernel before runs, and waits for it. Where prefixes are shared, their
    tiles are a launch between the two, which ends at once where a step has none.

    Raises:
        ValueError: queries, output or cache do not lie where the kernel's copies ask for them.
    """
    (q_latent, q_rope), (kv_latent, kv_rope) = x.q, x.kv
    for name, tensor, stride in (
        ("q_latent", q_latent, x.strides_q_t[0]),
        ("q_rope", q_rope, x.strides_q_t[1]),
        ("out", x.out, 0),
    ):
        if tensor.data_ptr() % 16 or stride % 8 or tensor.stride()[2] % 8:
            raise ValueError(
                f"{name} must have rows that start at multiples of 16 bytes, got strides"
                f" {list(tensor.stride())} at address {tensor.data_ptr():#x}"
            )
    plan, prefix, rows = x.plan, x.plan.prefix, x.spec.query_rows
    slot_rows = combine.slot_rows(rows)
    reserved = slot_rows if prefix is None else PREFIX_ROWS
    partial_out, partial_lse = scratch.reserve(plan.num_slots, reserved, LATENT_DIM)
    row_tiles = -(-rows // 64)
    latent, latent_pieces = _maps(kv_latent)
    rope, rope_pieces = _maps(kv_rope)
    call = functools.partial(
        PARAMS.pack,
        latent=latent,
        latent_pieces=latent_pieces,
        rope=rope,
        rope_pieces=rope_pieces,
        q_latent=q_latent.data_ptr(),
        q_rope=q_rope.data_ptr(),
        out=x.out.data_ptr(),
        lse=x.lse.data_ptr(),
        partial_out=partial_out.data_ptr(),
        partial_lse=partial_lse.data_ptr(),
        lengths=plan.lengths.data_ptr(),
        block_table=x.block_table.data_ptr(),
        members=0 if prefix is None else prefix.members.data_ptr(),
        sinks=0 if x.sinks is None else x.sinks.data_ptr(),
        stride_q_latent_t=x.strides_q_t[0],
        stride_q_latent_h=q_latent.stride()[2],
        stride_q_rope_t=x.strides_q_t[1],
        stride_q_rope_h=q_rope.stride()[2],
        scale=x.scale,
        table_stride=x.block_table.stride()[0],
        page_size=kv_latent.shape[1],
        heads=x.spec.num_heads,
        query_tokens=x.spec.query_tokens,
        causal=x.causal and x.spec.query_tokens > 1,
        row_tiles=row_tiles,
    )
    own = call(
        work=plan.work.data_ptr(),
        num_splits=plan.num_splits.data_ptr(),
        tiles=0 if prefix is None else prefix.tiles.data_ptr(),
        partial_rows=slot_rows,
        prefetch_safe=x.pdl_prefetch_safe,
    )
    kernel = _kernel(min(rows, 64), row_tiles == 1)  # then nobody else reads the keys
    kernel(plan.num_ctas * row_tiles, THREADS, own + _ALIGNMENT, pdl=True)
    if prefix is not None:
        assert prefix.work is not None
        requests = plan.requests
        shared = call(
            work=prefix.work.data_ptr(),
            num_splits=plan.num_splits[requests + 1 :].data_ptr(),
            tiles=prefix.tiles[requests:].data_ptr(),
            partial_rows=PREFIX_ROWS,
            # every CTA waits, so that the end of this launch is the end of the one before too
            prefetch_safe=False,
        )
        _kernel(PREFIX_ROWS, False)(plan.num_ctas, THREADS, shared + _ALIGNMENT, pdl=True)
    combine.combine_sm90(x, partial_out, partial_lse)


def defines(rows: int, evict_first: bool) -> dict[str, int]:
    """Preprocessor constants for a tile of up to ``rows`` query rows: of shared memory the queries
    take what they need and the ring of keys the rest."""
    size = next(size for size in (8, 16, 32, 64) if size >= rows)
    halves, ropes = {8: (6, 3), 16: (5, 4), 32: (5, 3), 64: (4, 3)}[size]
    return {
        "ROWS": size,
        "HALVES": halves,
        "ROPES": ropes,
        "READ_ONCE": int(evict_first),
    }


@functools.cache
def _kernel(rows: int, evict_first: bool) -> CudaKernel:
    return CudaKernel(SOURCE, "mla_decode", PARAMS, defines(rows, evict_first))


def _maps(cache: torch.Tensor) -> tuple[TensorMap, TensorMap]:
    """Tensor maps of one part of the cache: boxes of 64 rows, and of 16.

    Keyed on all that a map holds: an address is soon another cache's.
    """
    pages, page_size, channels = cache.shape
    stride = cache.stride()
    return _encode(cache.data_ptr(), pages, page_size, channels, stride[0], stride[1])


@functools.lru_cache(maxsize=1024)
def _encode(
    address: int, pages: int, page_size: int, channels: int, page_stride: int, row_stride: int
) -> tuple[TensorMap, TensorMap]:
    extents, strides = (channels, page_size, pages), (row_stride, page_stride)
    box = min(_BOX, page_size)
    return _tensor_map(address, extents, strides, box), _tensor_map(
        address, extents, strides, _PIECE
    )


def _tensor_map(
    address: int, extents: tuple[int, int, int], strides: tuple[int, int], rows: int
) -> TensorMap:
    """CUtensorMap of bf16 ``[pages, rows, channels]``, innermost first; strides in elements."""
    buffer = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(buffer) + 63) // 64 * 64
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    bf16, no_interleave, swizzle_128b, no_fill = 9, 0, 3, 0
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        bf16,
        3,
        ctypes.c_void_p(address),
        (u64 * 3)(*extents),
        (u64 * 2)(*(2 * stride for stride in strides)),
        (u32 * 3)(64, rows, 1),
        (u32 * 3)(1, 1, 1),
        no_interleave,
        swizzle_128b,
        _PROMOTE_128B,
        no_fill,
    )
    if status:
        raise ValueError(
            f"the cache must be one that TMA can read (address a multiple of 16 bytes, strides"
            f" too), got address {address:#x}, extents {extents}, strides {strides}"
        )
    return tuple((u64 * 16).from_address(at))
