"""MLA decode on Hopper in CUDA C++: the main kernel over the work list, then combine."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from backend_core.launch.cuda import CudaKernel, CudaLaunch
from backend_core.launch.cuda_params import CudaParams
from backend_core.tables.schema import Row
from backend_core.target import Target
from mla_backend import combine
from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.decode import Planning, PreparedDecode, ctas_of
from mla_backend.plan.fill import fill_sm90
from mla_backend.scratch import SplitScratch
from mla_backend.spec import LATENT_DIM, MlaSpec

SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "mla_decode.cu"
THREADS = 384
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
    (
        *("latent", "latent_pieces", "rope", "rope_pieces", "q_latent", "q_rope", "out", "lse"),
        *("partial_out", "partial_lse", "block_table", "sinks"),
    ),
    alignment=64,  # that of a tensor map
)
_BOX = 64
_PIECE = 16
PREFIX_ROWS = 64
"""Rows of a tile of a shared prefix, and of a slot of its partial results."""
_PROMOTE_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class DecodeAddresses(NamedTuple):
    """Facts of a layer in a step: tensor maps, addresses; 0 for none."""

    latent: bytes
    latent_pieces: bytes
    rope: bytes
    rope_pieces: bytes
    q_latent: int
    q_rope: int
    out: int
    lse: int
    partial_out: int
    partial_lse: int
    block_table: int
    sinks: int


def bind(row: Row, spec: MlaSpec, target: Target) -> Sm90Decode:
    return Sm90Decode(spec)


def plan(row: Row, spec: MlaSpec, num_sms: int, shares: bool) -> Planning:
    fill = functools.partial(fill_sm90, spec.query_rows)
    return Planning(ctas_of(spec, num_sms, shares), shares, True, fill)


class Sm90Decode:
    """Two launches: partial outputs or, where a tile has one split, the output; then the merge.

    Each is placed while the kernel before runs, and waits for it. Where prefixes are shared, their
    tiles are a launch between the two, which ends at once where a step has none.
    """

    def __init__(self, spec: MlaSpec) -> None:
        self._rows = rows = spec.query_rows
        self._row_tiles = -(-rows // 64)
        # of one tile of rows, nobody else reads the keys
        self._own = _kernel(defines(min(rows, 64), self._row_tiles == 1))

    @functools.cached_property
    def _shared(self) -> CudaKernel:
        return _kernel(defines(PREFIX_ROWS, False))

    def prepare(self, x: MlaInputs) -> PreparedDecode:
        """The launches of a plan.

        Raises:
            ValueError: queries or output do not lie where the kernel's copies ask for them.
        """
        strides_h = [part.stride()[2] for part in x.q]
        for name, tensor, stride in zip(("q_latent", "q_rope"), x.q, x.strides_q_t, strict=True):
            if stride % 8 or tensor.stride()[2] % 8:
                raise ValueError(_off_16_bytes(name, tensor))
        plan, prefix = x.plan, x.plan.prefix
        slot_rows = combine.slot_rows(self._rows)
        launch = functools.partial(
            CudaLaunch,
            block=THREADS,
            params=PARAMS,
            pdl=True,
            lengths=plan.lengths.data_ptr(),
            members=0 if prefix is None else prefix.members.data_ptr(),
            stride_q_latent_t=x.strides_q_t[0],
            stride_q_latent_h=strides_h[0],
            stride_q_rope_t=x.strides_q_t[1],
            stride_q_rope_h=strides_h[1],
            scale=x.scale,
            table_stride=x.block_table.stride()[0],
            page_size=x.spec.page_size,
            heads=x.spec.num_heads,
            query_tokens=x.spec.query_tokens,
            causal=x.causal and x.spec.query_tokens > 1,
            row_tiles=self._row_tiles,
        )
        launches: list[Callable[[DecodeAddresses], None]] = [
            launch(
                self._own,
                plan.num_ctas * self._row_tiles,
                work=plan.work.data_ptr(),
                num_splits=plan.num_splits.data_ptr(),
                tiles=0 if prefix is None else prefix.tiles.data_ptr(),
                partial_rows=slot_rows,
                prefetch_safe=x.pdl_prefetch_safe,
            )
        ]
        if prefix is not None:
            assert prefix.work is not None
            shared = launch(
                self._shared,
                plan.num_ctas,
                work=prefix.work.data_ptr(),
                num_splits=plan.num_splits[plan.requests + 1 :].data_ptr(),
                tiles=prefix.tiles[plan.requests :].data_ptr(),
                partial_rows=PREFIX_ROWS,
                # every CTA waits, so that the end of this launch is the end of the one before too
                prefetch_safe=False,
            )
            launches.append(shared)
        launches.append(combine.launch_sm90(x))
        reserved = plan.num_slots, slot_rows if prefix is None else PREFIX_ROWS, LATENT_DIM
        return functools.partial(_run, tuple(launches), reserved)


def _run(
    launches: tuple[Callable[[DecodeAddresses], None], ...],
    reserved: tuple[int, int, int],
    x: MlaInputs,
    scratch: SplitScratch,
) -> None:
    """Raises ValueError where a tensor's first element does not lie on 16 bytes."""
    (q_latent, q_rope), (kv_latent, kv_rope) = x.q, x.kv
    at, rope_at, out_at = q_latent.data_ptr(), q_rope.data_ptr(), x.out.data_ptr()
    if (at | rope_at | out_at) & 15:
        named = (("q_latent", q_latent), ("q_rope", q_rope), ("out", x.out))
        raise ValueError(next(_off_16_bytes(*one) for one in named if one[1].data_ptr() & 15))
    partial_out, partial_lse = scratch.reserve(*reserved)
    addresses = DecodeAddresses(
        *_maps(kv_latent),
        *_maps(kv_rope),
        at,
        rope_at,
        out_at,
        x.lse.data_ptr(),
        partial_out.data_ptr(),
        partial_lse.data_ptr(),
        x.block_table.data_ptr(),
        0 if x.sinks is None else x.sinks.data_ptr(),
    )
    for launch in launches:
        launch(addresses)


def _off_16_bytes(name: str, tensor: torch.Tensor) -> str:
    return (
        f"{name} must have rows that start at multiples of 16 bytes, got strides"
        f" {list(tensor.stride())} at address {tensor.data_ptr():#x}"
    )


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


def _kernel(defines: dict[str, int]) -> CudaKernel:
    return CudaKernel(SOURCE, "mla_decode", PARAMS, defines)


def _maps(cache: torch.Tensor) -> tuple[bytes, bytes]:
    """Tensor maps of one part of the cache: boxes of 64 rows, and of 16.

    Keyed on all that a map holds: an address is soon another cache's.
    """
    pages, page_size, channels = cache.shape
    stride = cache.stride()
    return _encode(cache.data_ptr(), pages, page_size, channels, stride[0], stride[1])


@functools.lru_cache(maxsize=1024)
def _encode(
    address: int, pages: int, page_size: int, channels: int, page_stride: int, row_stride: int
) -> tuple[bytes, bytes]:
    extents, strides = (channels, page_size, pages), (row_stride, page_stride)
    box = min(_BOX, page_size)
    return _tensor_map(address, extents, strides, box), _tensor_map(
        address, extents, strides, _PIECE
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
    return ctypes.string_at(at, 128)
