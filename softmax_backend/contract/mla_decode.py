"""The inputs of an MLA decode step, checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from softmax_backend.spec import LATENT_DIM, ROPE_DIM, MlaSpec
from softmax_backend.step_plan import StepPlan

FP8_DS_MLA_BYTES = 656
_FP8 = (torch.float8_e4m3fn, torch.uint8)


@dataclass(frozen=True, eq=False)
class MlaInputs:
    """One call, as the paths take it.

    Attributes:
        q_latent: ``[requests, query tokens, heads, 512]``; q_rope: the same with 64.
        kv_latent: ``[pages, page size, 512]``; kv_rope: ``[pages, page size, 64]``; an fp8 part is
            uint8 here.
        kv_scales: ``[pages, page size, 4]`` float32 of an fp8_ds_mla cache, else ``None``.
        kv_scale: of an fp8 cache, else 1.
    """

    spec: MlaSpec
    plan: StepPlan
    q_latent: torch.Tensor
    q_rope: torch.Tensor
    kv_latent: torch.Tensor
    kv_rope: torch.Tensor
    kv_scales: torch.Tensor | None
    kv_scale: float
    block_table: torch.Tensor
    scale: float
    causal: bool
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def split_cache(
    cache: torch.Tensor, spec: MlaSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(latent part, RoPE part, scales) of a cache that keeps a token's parts side by side.

    Args:
        cache: ``[pages, page size, 576]``, or ``[pages, page size, 656]`` bytes of fp8_ds_mla.

    Raises:
        ValueError: the cache is not in the spec's format.
    """
    if spec.cache_format == "fp8_ds_mla":
        expect_shape("cache", cache, ("pages", spec.page_size, FP8_DS_MLA_BYTES))
        expect_dtype("cache", cache, *_FP8)
        expect_stride("cache", cache, 2, 1)
        if cache.data_ptr() % 16 or any(stride % 16 for stride in cache.stride()[:2]):
            raise ValueError("cache must have tokens that start at multiples of 16 bytes")
        raw = cache.view(torch.uint8)
        scales = raw[..., LATENT_DIM : LATENT_DIM + 16].view(torch.float32)
        return raw[..., :LATENT_DIM], raw[..., LATENT_DIM + 16 :].view(torch.bfloat16), scales
    expect_shape("cache", cache, ("pages", spec.page_size, LATENT_DIM + ROPE_DIM))
    return cache[..., :LATENT_DIM], cache[..., LATENT_DIM:], None


def by_request(q: torch.Tensor, requests: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` as ``[requests, query tokens, heads, dim]``, without a copy."""
    tokens = q.shape[0] // requests
    # the stride of a dimension of one element counts too: it is the kernels' stride of tokens
    strides = (tokens * q.stride(0), *q.stride())
    return q.as_strided((requests, tokens, *q.shape[1:]), strides)


def expect_heads(name: str, plan: StepPlan, spec: MlaSpec) -> None:
    """Require a plan with shared prefixes, whose tiles are of heads, to be for the spec's."""
    if plan.prefix is not None and plan.prefix.num_heads != spec.num_heads:
        raise ValueError(
            f"{name} with shared prefixes must be for {spec.num_heads} heads, got one for"
            f" {plan.prefix.num_heads}"
        )


def check_mla_decode(
    spec: MlaSpec,
    plan: StepPlan,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_latent: torch.Tensor,
    kv_rope: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    kv_scale: float,
    kv_scales: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> MlaInputs:
    """Check a call, and allocate what it brings no memory for.

    Raises:
        ValueError: an input is not as `softmax_backend.mla_decode` describes it.
    """
    rows = (plan.requests, spec.query_tokens, spec.num_heads)
    device = plan.device
    if plan.query_tokens != spec.query_tokens:
        raise ValueError(
            f"plan must be for {spec.query_tokens} query tokens, got one for {plan.query_tokens}"
        )
    expect_heads("plan", plan, spec)
    expect_dtype("lengths", plan.lengths, torch.int32)
    expect_shape("lengths", plan.lengths, ("requests",))
    expect_stride("lengths", plan.lengths, 0, 1)
    for name, tensor, dim in (("q_latent", q_latent, LATENT_DIM), ("q_rope", q_rope, ROPE_DIM)):
        expect_shape(name, tensor, (*rows, dim))
        expect_dtype(name, tensor, spec.dtype)
        expect_device(name, tensor, device)
        expect_stride(name, tensor, 3, 1)
        _expect_token_rows(name, tensor)
    _check_cache(spec, kv_latent, kv_rope, kv_scales, device)
    expect_shape("block_table", block_table, (plan.requests, "pages"))
    expect_dtype("block_table", block_table, torch.int32)
    expect_device("block_table", block_table, device)
    expect_stride("block_table", block_table, 1, 1)
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if not 0 < kv_scale < float("inf"):
        raise ValueError(f"kv_scale must be positive and finite, got {kv_scale}")
    if spec.cache_format != "fp8" and kv_scale != 1.0:
        raise ValueError(f"kv_scale must be 1 for a {spec.cache_format} cache, got {kv_scale}")
    if sinks is not None:
        expect_shape("sinks", sinks, (spec.num_heads,))
        expect_dtype("sinks", sinks, torch.float32)
        expect_device("sinks", sinks, device)
        expect_stride("sinks", sinks, 0, 1)
    if out is None:
        out = torch.empty(*rows, LATENT_DIM, dtype=spec.dtype, device=device)
    if lse is None:
        lse = torch.empty(rows, dtype=torch.float32, device=device)
    _expect_output("out", out, (*rows, LATENT_DIM), spec.dtype, device)
    _expect_output("lse", lse, rows, torch.float32, device)
    return MlaInputs(
        spec=spec,
        plan=plan,
        q_latent=q_latent,
        q_rope=q_rope,
        kv_latent=kv_latent if kv_latent.dtype not in _FP8 else kv_latent.view(torch.uint8),
        kv_rope=kv_rope if kv_rope.dtype not in _FP8 else kv_rope.view(torch.uint8),
        kv_scales=kv_scales,
        kv_scale=kv_scale,
        block_table=block_table,
        scale=scale,
        causal=causal,
        sinks=sinks,
        out=out,
        lse=lse,
    )


def _expect_token_rows(name: str, tensor: torch.Tensor) -> None:
    """Tokens of all requests must lie at one stride: request r's follow r - 1's."""
    tokens = tensor.shape[1]
    if tokens > 1 and tensor.shape[0] > 1 and tensor.stride(0) != tokens * tensor.stride(1):
        raise ValueError(
            f"{name} must have stride {tokens * tensor.stride(1)} in dimension 0, got"
            f" {tensor.stride(0)}"
        )


def _check_cache(
    spec: MlaSpec,
    kv_latent: torch.Tensor,
    kv_rope: torch.Tensor,
    kv_scales: torch.Tensor | None,
    device: torch.device,
) -> None:
    formats = {
        "16-bit": ((spec.dtype,), (spec.dtype,)),
        "fp8": (_FP8, _FP8),
        "fp8_ds_mla": (_FP8, (torch.bfloat16,)),
    }
    latent_types, rope_types = formats[spec.cache_format]
    parts = (
        ("kv_latent", kv_latent, LATENT_DIM, latent_types),
        ("kv_rope", kv_rope, ROPE_DIM, rope_types),
    )
    for name, tensor, dim, dtypes in parts:
        expect_shape(name, tensor, (kv_latent.shape[0], spec.page_size, dim))
        expect_dtype(name, tensor, *dtypes)
        expect_device(name, tensor, device)
        expect_stride(name, tensor, 2, 1)
    if (kv_scales is None) == (spec.cache_format == "fp8_ds_mla"):
        wanted = "given" if kv_scales is None else "None"
        raise ValueError(f"kv_scales must be {wanted} for a {spec.cache_format} cache")
    if kv_scales is not None:
        expect_shape("kv_scales", kv_scales, (kv_latent.shape[0], spec.page_size, 4))
        expect_dtype("kv_scales", kv_scales, torch.float32)
        expect_device("kv_scales", kv_scales, device)
        expect_stride("kv_scales", kv_scales, 2, 1)


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
