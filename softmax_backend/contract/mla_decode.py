"""The inputs of an MLA decode step, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from softmax_backend.spec import LATENT_DIM, ROPE_DIM, MlaSpec
from softmax_backend.step_plan import StepPlan

_DIMS = (LATENT_DIM, ROPE_DIM)


@dataclass(slots=True, eq=False)
class MlaInputs:
    """One call, as the paths take it; see `softmax_backend.api.mla_decode`.

    Attributes:
        q, kv: latents and RoPE channels of queries and of the cache.
        strides_q_t: from one query token to the next, of each part of ``q``.
    """

    spec: MlaSpec
    plan: StepPlan
    q: tuple[torch.Tensor, torch.Tensor]
    kv: tuple[torch.Tensor, torch.Tensor]
    block_table: torch.Tensor
    scale: float
    causal: bool
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    pdl_prefetch_safe: bool
    strides_q_t: tuple[int, int]


def split_cache(cache: torch.Tensor, spec: MlaSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent part, RoPE part) of a cache ``[pages, page size, 576]``.

    Raises:
        ValueError: the cache has another shape.
    """
    expect_shape("cache", cache, ("pages", spec.page_size, LATENT_DIM + ROPE_DIM))
    return cache[..., :LATENT_DIM], cache[..., LATENT_DIM:]


def by_request(q: torch.Tensor, requests: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` as ``[requests, query tokens, heads, dim]``, without a copy."""
    tokens = q.shape[0] // requests
    # the stride of a dimension of one element counts too: it is the kernels' stride of tokens
    strides = (tokens * q.stride(0), *q.stride())
    return q.as_strided((requests, tokens, *q.shape[1:]), strides)


def expect_heads(name: str, prefix_heads: int | None, spec: MlaSpec) -> None:
    """Require a plan with shared prefixes, whose tiles are of heads, to be for the spec's."""
    if prefix_heads not in (None, spec.num_heads):
        raise ValueError(
            f"{name} with shared prefixes must be for {spec.num_heads} heads, got one for"
            f" {prefix_heads}"
        )


def check_mla_decode(
    spec: MlaSpec,
    lengths: torch.Tensor,
    query_tokens: int,
    prefix_heads: int | None,
    q: tuple[torch.Tensor, torch.Tensor],
    kv: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Check a call.

    Args:
        lengths, query_tokens: of the plan; prefix_heads: of its shared prefixes, where it has some.

    Raises:
        ValueError: an input is not as `softmax_backend.api.mla_decode` describes it.
    """
    rows = (lengths.shape[0], spec.query_tokens, spec.num_heads)
    device = lengths.device
    if query_tokens != spec.query_tokens:
        raise ValueError(
            f"plan must be for {spec.query_tokens} query tokens, got one for {query_tokens}"
        )
    expect_heads("plan", prefix_heads, spec)
    expect_dtype("lengths", lengths, torch.int32)
    expect_shape("lengths", lengths, ("requests",))
    expect_stride("lengths", lengths, 0, 1)
    for name, tensor, dim in zip(("q_latent", "q_rope"), q, _DIMS, strict=True):
        expect_shape(name, tensor, (*rows, dim))
        expect_dtype(name, tensor, spec.dtype)
        expect_device(name, tensor, device)
        expect_stride(name, tensor, 3, 1)
        _expect_token_rows(name, tensor)
    for name, tensor, dim in zip(("kv_latent", "kv_rope"), kv, _DIMS, strict=True):
        expect_shape(name, tensor, (kv[0].shape[0], spec.page_size, dim))
        expect_dtype(name, tensor, spec.dtype)
        expect_device(name, tensor, device)
        expect_stride(name, tensor, 2, 1)
    expect_shape("block_table", block_table, (rows[0], "pages"))
    expect_dtype("block_table", block_table, torch.int32)
    expect_device("block_table", block_table, device)
    expect_stride("block_table", block_table, 1, 1)
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if sinks is not None:
        expect_shape("sinks", sinks, (spec.num_heads,))
        expect_dtype("sinks", sinks, torch.float32)
        expect_device("sinks", sinks, device)
        expect_stride("sinks", sinks, 0, 1)
    if out is not None:
        _expect_output("out", out, (*rows, LATENT_DIM), spec.dtype, device)
    if lse is not None:
        _expect_output("lse", lse, rows, torch.float32, device)


def _expect_token_rows(name: str, tensor: torch.Tensor) -> None:
    """Tokens of all requests must lie at one stride: request r's follow r - 1's."""
    tokens = tensor.shape[1]
    if tokens > 1 and tensor.shape[0] > 1 and tensor.stride(0) != tokens * tensor.stride(1):
        raise ValueError(
            f"{name} must have stride {tokens * tensor.stride(1)} in dimension 0, got"
            f" {tensor.stride(0)}"
        )


def _expect_output(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    expect_shape(name, tensor, shape)
    expect_dtype(name, tensor, dtype)
    expect_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
