"""The inputs of an MLA decode step, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend_core.contracts import check_scale, expect_shape, expect_tensor
from mla_backend.contract import expect_output, expect_token_stride
from mla_backend.spec import LATENT_DIM, ROPE_DIM, MlaSpec
from mla_backend.step_plan import MlaPlan

_DIMS = (LATENT_DIM, ROPE_DIM)


@dataclass(slots=True, eq=False)
class MlaInputs:
    """One call, as the paths take it; see `mla_backend.api.mla_decode`.

    Attributes:
        q, kv: latents and RoPE channels of queries and of the cache.
        strides_q_t: from one query token to the next, of each part of ``q``.
    """

    spec: MlaSpec
    plan: MlaPlan
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
        ValueError: an input is not as `mla_backend.api.mla_decode` describes it.
    """
    rows = (lengths.shape[0], spec.query_tokens, spec.num_heads)
    device = lengths.device
    if query_tokens != spec.query_tokens:
        raise ValueError(
            f"plan must be for {spec.query_tokens} query tokens, got one for {query_tokens}"
        )
    expect_heads("plan", prefix_heads, spec)
    expect_tensor("lengths", lengths, ("requests",), torch.int32, device)
    for name, tensor, dim in zip(("q_latent", "q_rope"), q, _DIMS, strict=True):
        expect_tensor(name, tensor, (*rows, dim), spec.dtype, device)
        expect_token_stride(name, tensor)
    pages: int | str = "pages"
    for name, tensor, dim in zip(("kv_latent", "kv_rope"), kv, _DIMS, strict=True):
        expect_tensor(name, tensor, (pages, spec.page_size, dim), spec.dtype, device)
        pages = tensor.shape[0]
    expect_tensor("block_table", block_table, (rows[0], "pages"), torch.int32, device)
    check_scale(scale)
    if sinks is not None:
        expect_tensor("sinks", sinks, (spec.num_heads,), torch.float32, device)
    expect_output("out", out, (*rows, LATENT_DIM), spec.dtype, device)
    expect_output("lse", lse, rows, torch.float32, device)
