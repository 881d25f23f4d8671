"""The inputs of sparse MLA, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backend_core.contracts import (
    check_scale,
    expect_device,
    expect_dtype,
    expect_near,
    expect_shape,
    expect_stride,
    expect_tensor,
)
from backend_core.formats import RECORD_FORMATS
from mla_backend.contract import expect_output, expect_token_stride
from mla_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

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


def at_one_stride(x: torch.Tensor) -> torch.Tensor:
    """``[requests, query tokens, ...]`` as the operators take it: the tensor, or a copy where the
    last dimension has gaps or the query tokens of all requests do not lie at one stride."""
    if x.dim() < 3:
        return x  # of a shape that is refused
    requests, tokens = x.shape[:2]
    even = requests == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1)
    return x if even and x.stride(-1) == 1 else x.contiguous()


@dataclass(slots=True, eq=False)
class SparseMlaInputs:
    """One call, as the paths take it; see `mla_backend.sparse_mla.sparse_mla`.

    Attributes:
        tokens: query tokens of all requests.
        stride_q_t, stride_indices, stride_extra_indices: from one of them to the next.
    """

    spec: SparseMlaSpec
    q: torch.Tensor
    rows: NamedRows
    extra: NamedRows | None
    scale: float
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor

    tokens: int
    query_tokens: int
    stride_q_t: int
    stride_indices: int
    stride_extra_indices: int

    def rows_arguments(self) -> dict[str, Any]:
        """Arguments of every kernel over rows of bf16."""
        rows = self.rows
        return {
            "q_ptr": self.q,
            "kv_ptr": rows.cache,
            "indices_ptr": rows.indices,
            "lengths_ptr": rows.lengths,
            "sinks_ptr": self.sinks,
            "out_ptr": self.out,
            "lse_ptr": self.lse,
            "scale": self.scale,
            "stride_q_t": self.stride_q_t,
            "stride_kv": rows.cache.stride()[0],
            "stride_indices": self.stride_indices,
            "topk": rows.topk,
            "rows": rows.num_rows,
            "query_tokens": self.query_tokens,
            "heads": self.spec.num_heads,
        }


def check_sparse_mla(
    spec: SparseMlaSpec,
    q: torch.Tensor,
    rows: NamedRows,
    extra: NamedRows | None,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Check all of a call but the caches' addresses (`check_addresses`).

    Raises:
        ValueError: an input is not as `mla_backend.sparse_mla.sparse_mla` describes it.
    """
    device = q.device
    shape = ("requests", "query tokens", spec.num_heads, HEAD_DIM)
    expect_tensor("q", q, shape, torch.bfloat16, device)
    expect_token_stride("q", q)
    requests, tokens = q.shape[:2]
    if (extra is None) == bool(spec.extra_page_size):
        wanted = "given" if extra is None else "None"
        raise ValueError(f"extra must be {wanted} for extra_page_size {spec.extra_page_size}")
    _check_rows("rows", spec, rows, spec.page_size, requests, tokens, device)
    if extra is not None:
        _check_rows("extra", spec, extra, spec.extra_page_size, requests, tokens, device)
    check_scale(scale)
    if sinks is not None:
        expect_tensor("sinks", sinks, (spec.num_heads,), torch.float32, device)
    rows_of = (requests, tokens, spec.num_heads)
    expect_output("out", out, (*rows_of, HEAD_DIM), q.dtype, device)
    expect_output("lse", lse, rows_of, torch.float32, device)
    expect_near("q", q, 2)


def check_addresses(rows: NamedRows, extra: NamedRows | None) -> None:
    """Pages and rows start at multiples of 16 bytes, which every call has to show."""
    for name, given in (("rows", rows), ("extra", extra)):
        if given is not None and given.cache.data_ptr() & 15:
            raise ValueError(
                f"{name}.cache must start at a multiple of 16 bytes, got address"
                f" {given.cache.data_ptr()}"
            )


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
        if cache.stride(0) % 8:
            raise ValueError(f"{name}.cache must have rows that start at multiples of 16 bytes")
    else:
        expect_shape(f"{name}.cache", cache, ("pages", page_size, RECORD.record_bytes))
        expect_dtype(f"{name}.cache", cache, *_BYTES)
        expect_stride(f"{name}.cache", cache, 1, RECORD.record_bytes)
        expect_stride(f"{name}.cache", cache, 2, 1)
        if cache.stride(0) % 16:
            raise ValueError(
                f"{name}.cache must have pages that start at multiples of 16 bytes, got"
                f" {cache.stride(0)} bytes from page to page"
            )
        if cache.shape[0] * page_size >= 2**31:
            raise ValueError(
                f"{name}.cache must have fewer than 2**31 rows, got {cache.shape[0] * page_size}"
            )
    expect_tensor(f"{name}.indices", indices, (requests, tokens, "topk"), torch.int32, device)
    expect_token_stride(f"{name}.indices", indices)
    if lengths is not None:
        expect_tensor(f"{name}.lengths", lengths, (requests,), torch.int32, device)
