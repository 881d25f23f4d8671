"""The inputs of sparse MLA, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from backend_core.formats import RECORD_FORMATS
from softmax_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

RECORD = RECORD_FORMATS["fp8_ds_mla"]
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class NamedRows:
    """Rows of a cache, and which of them each query token sees.

    Attributes:
        cache: ``[pages, page size, 584]`` bytes of records: a page holds the 576 bytes of data of
            its rows one after another, then their 8 bytes of scales; the stride of the pages, in
            bytes, is a multiple of 16. Or ``[rows, 512]`` bf16. Rows that no index names may hold
            anything.
        indices: ``[requests, query tokens, topk]`` int32: page times page size plus row. Negative
            ones, and those beyond the cache, name nothing.
        lengths: ``[requests]`` int32, how many indices count, from the left; or ``None`` for all.
    """

    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None = None

    @property
    def topk(self) -> int:
        return self.indices.shape[2]

    @property
    def num_rows(self) -> int:
        """Rows in the cache, beyond which no index names anything."""
        return self.cache.shape[0] * (self.cache.shape[1] if self.cache.dim() == 3 else 1)


def token_stride(x: torch.Tensor) -> int:
    """Elements from a query token of ``[requests, query tokens, ...]`` to the next one.

    Where a request has one query token, that dimension's stride may be anything.
    """
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


@dataclass(frozen=True, eq=False)
class SparseMlaInputs:
    """One call, as the paths take it; see `softmax_backend.sparse_mla.sparse_mla`."""

    spec: SparseMlaSpec
    q: torch.Tensor
    rows: NamedRows
    extra: NamedRows | None
    scale: float
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def topks(self) -> tuple[int, ...]:
        """Entries of a token's lists."""
        return tuple(given.topk for given in (self.rows, self.extra) if given is not None)


def check_sparse_mla(
    spec: SparseMlaSpec,
    q: torch.Tensor,
    rows: NamedRows,
    extra: NamedRows | None,
    *,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    max_logits: torch.Tensor | None,
) -> SparseMlaInputs:
    """Check a call, and allocate what it brings no memory for.

    Raises:
        ValueError: an input is not as `softmax_backend.sparse_mla.sparse_mla` describes it.
    """
    device = q.device
    expect_shape("q", q, ("requests", "query tokens", spec.num_heads, HEAD_DIM))
    expect_dtype("q", q, torch.bfloat16)
    expect_stride("q", q, 3, 1)
    requests, tokens = q.shape[:2]
    if tokens > 1 and requests > 1 and q.stride(0) != tokens * q.stride(1):
        raise ValueError(
            f"q must have stride {tokens * q.stride(1)} in dimension 0, got {q.stride(0)}"
        )
    if (extra is None) == bool(spec.extra_page_size):
        wanted = "given" if extra is None else "None"
        raise ValueError(f"extra must be {wanted} for extra_page_size {spec.extra_page_size}")
    _check_rows("rows", spec, rows, spec.page_size, requests, tokens, device)
    if extra is not None:
        _check_rows("extra", spec, extra, spec.extra_page_size, requests, tokens, device)
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if sinks is not None:
        expect_shape("sinks", sinks, (spec.num_heads,))
        expect_dtype("sinks", sinks, torch.float32)
        expect_device("sinks", sinks, device)
        expect_stride("sinks", sinks, 0, 1)
    shape = (requests, tokens, spec.num_heads)
    if out is None:
        out = torch.empty(*shape, HEAD_DIM, dtype=q.dtype, device=device)
    if lse is None:
        lse = torch.empty(shape, dtype=torch.float32, device=device)
    outputs = [("out", out, (*shape, HEAD_DIM), q.dtype), ("lse", lse, shape, torch.float32)]
    if max_logits is not None:
        outputs.append(("max_logits", max_logits, shape, torch.float32))
    for name, tensor, wanted_shape, dtype in outputs:
        expect_shape(name, tensor, wanted_shape)
        expect_dtype(name, tensor, dtype)
        expect_device(name, tensor, device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
    return SparseMlaInputs(spec, q, rows, extra, scale, sinks, out, lse, max_logits)


def _check_rows(
    name: str,
    spec: SparseMlaSpec,
    given: NamedRows,
    page_size: int,
    requests: int,
    tokens: int,
    device: torch.device,
) -> None:
    cache, indices, lengths = given.cache, given.indices, given.lengths
    expect_device(f"{name}.cache", cache, device)
    if spec.cache_format == "bf16_rows":
        expect_shape(f"{name}.cache", cache, ("rows", HEAD_DIM))
        expect_dtype(f"{name}.cache", cache, torch.bfloat16)
        expect_stride(f"{name}.cache", cache, 1, 1)
        if cache.data_ptr() % 16 or cache.stride(0) % 8:
            raise ValueError(f"{name}.cache must have rows that start at multiples of 16 bytes")
    else:
        expect_shape(f"{name}.cache", cache, ("pages", page_size, RECORD.record_bytes))
        expect_dtype(f"{name}.cache", cache, *_BYTES)
        expect_stride(f"{name}.cache", cache, 1, RECORD.record_bytes)
        expect_stride(f"{name}.cache", cache, 2, 1)
        if cache.data_ptr() % 16 or cache.stride(0) % 16:
            raise ValueError(
                f"{name}.cache must have pages that start at multiples of 16 bytes, got address"
                f" {cache.data_ptr()} and {cache.stride(0)} bytes from page to page"
            )
        if cache.shape[0] * page_size >= 2**31:
            raise ValueError(
                f"{name}.cache must have fewer than 2**31 rows, got {cache.shape[0] * page_size}"
            )
    expect_shape(f"{name}.indices", indices, (requests, tokens, "topk"))
    expect_dtype(f"{name}.indices", indices, torch.int32)
    expect_device(f"{name}.indices", indices, device)
    expect_stride(f"{name}.indices", indices, 2, 1)
    if tokens > 1 and requests > 1 and indices.stride(0) != tokens * indices.stride(1):
        raise ValueError(
            f"{name}.indices must have stride {tokens * indices.stride(1)} in dimension 0, got"
            f" {indices.stride(0)}"
        )
    if lengths is not None:
        expect_shape(f"{name}.lengths", lengths, (requests,))
        expect_dtype(f"{name}.lengths", lengths, torch.int32)
        expect_device(f"{name}.lengths", lengths, device)
        expect_stride(f"{name}.lengths", lengths, 0, 1)
