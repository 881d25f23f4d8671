"""The contract of each operator's call."""

from __future__ import annotations

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride, once
from dsv4_backend.contract.values import (
    ROW_DTYPES,
    check_index,
    check_norm_weight,
    check_rope_table,
    expect_one_of,
    expect_positive,
)
from dsv4_backend.spec import CompressorLayer, CompressorSpec
from dsv4_backend.step_plan import CompressorStepPlan, SeqLens


def check_step_plan(step_plan: object, kind: type) -> None:
    """A step plan of the operator's kind, decode or prefill."""
    if not isinstance(step_plan, kind):
        raise ValueError(f"step_plan must be a {kind.__name__}, got {type(step_plan).__name__}")


def check_step(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    step_plan: CompressorStepPlan,
) -> None:
    """The contract of ``compress_decode_`` and ``compress_prefill_`` but for the plan's kind."""
    spec, device = layer.spec, layer.ape.device
    expect_shape("kv_score", kv_score, ("T", spec.row_width))
    if kv_score.shape[0] < step_plan.num_tokens:
        raise ValueError(
            f"kv_score must have at least {step_plan.num_tokens} rows (tokens of the step plan), "
            f"got {kv_score.shape[0]}"
        )
    expect_dtype("kv_score", kv_score, *ROW_DTYPES)
    expect_stride("kv_score", kv_score, 1, 1)
    block = spec.compress_ratio if step_plan.state_layout == "ring" else "block"
    expect_shape("state", state, ("pages", block, spec.row_width))
    expect_dtype("state", state, *ROW_DTYPES)
    expect_stride("state", state, 2, 1)
    check_cache(spec, cache)
    for name, where in (
        ("kv_score", kv_score.device),
        ("state", state.device),
        ("cache", cache.device),
        ("step_plan", step_plan.device),
    ):
        if where != device:
            raise ValueError(f"{name} must be on {device} (as ape is), got {where}")


def check_cache(spec: CompressorSpec, cache: torch.Tensor) -> None:
    """uint8 [pages, page bytes or more], pages a multiple of 4 bytes apart."""
    expect_shape("cache", cache, ("pages", "page bytes"))
    expect_dtype("cache", cache, torch.uint8)
    expect_stride("cache", cache, 1, 1)
    if cache.shape[1] < spec.page_bytes:
        raise ValueError(
            f"cache must have pages of at least {spec.page_bytes} bytes ({spec.page_tokens} tokens "
            f"of {spec.cache_format}), got {cache.shape[1]}"
        )
    if cache.stride(0) % 4 or cache.data_ptr() % 4:
        raise ValueError(
            f"cache must have pages aligned to 4 bytes, got stride {cache.stride(0)} "
            f"at address {cache.data_ptr()} mod 4 = {cache.data_ptr() % 4}"
        )


def check_in_place(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rope_table: torch.Tensor,
    step_plan: SeqLens,
    head_dim: int,
    compress_ratio: int,
    rotate: bool,
) -> None:
    """The contract of ``compress_norm_rope_hadamard_``."""
    expect_one_of("head_dim", head_dim, (128, 512))
    expect_one_of("compress_ratio", compress_ratio, (4, 128))
    if not isinstance(rotate, bool):
        raise ValueError(f"rotate must be a bool, got {rotate!r}")
    expect_positive("eps", eps)
    expect_shape("kv", kv, ("rows", head_dim))
    expect_dtype("kv", kv, *ROW_DTYPES)
    expect_stride("kv", kv, 1, 1)
    check_norm_weight("weight", weight, head_dim, kv.device)
    check_rope_table("freqs_cis", rope_table, kv.device)
    check_step_plan(step_plan, SeqLens)
    if step_plan.device != kv.device:
        raise ValueError(f"step_plan must be on {kv.device} (as kv is), got {step_plan.device}")
    if step_plan.num_tokens > kv.shape[0]:
        raise ValueError(
            f"seq_lens must have at most {kv.shape[0]} entries (rows of kv), "
            f"got {step_plan.num_tokens}"
        )


def check_queries(
    spec: CompressorSpec,
    q: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """The contract of ``quantise_indexer_queries``, once for calls with like tensors."""
    _check_queries((q, positions, rope_table, weights), spec.head_dim)


@once
def _check_queries(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], head_dim: int
) -> None:
    q, positions, rope_table, weights = tensors
    if head_dim != 128:
        raise ValueError(f"spec must be an indexer's (head_dim 128), got {head_dim}")
    expect_shape("q", q, ("T", "H", 128))
    expect_dtype("q", q, *ROW_DTYPES)
    expect_stride("q", q, 2, 1)
    (tokens, heads, _), device = q.shape, q.device
    check_index("positions", positions, (tokens,), device)
    check_rope_table("rope_table", rope_table, device)
    expect_shape("weights", weights, (tokens, heads))
    expect_dtype("weights", weights, *ROW_DTYPES)
    expect_stride("weights", weights, 1, 1)
    expect_device("weights", weights, device)
