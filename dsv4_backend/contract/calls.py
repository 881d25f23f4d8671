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

_CACHES = ("cache", "second_cache")


def check_step_plan(step_plan: object, kind: type) -> None:
    """A step plan of the operator's kind, decode or prefill."""
    if not isinstance(step_plan, kind):
        raise ValueError(f"step_plan must be a {kind.__name__}, got {type(step_plan).__name__}")


def check_step(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    caches: tuple[torch.Tensor, ...],
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
    check_caches(spec, caches)
    for name, where in (
        ("kv_score", kv_score.device),
        ("state", state.device),
        *zip(_CACHES, (cache.device for cache in caches), strict=False),
        ("step_plan", step_plan.device),
    ):
        if where != device:
            raise ValueError(f"{name} must be on {device} (as ape is), got {where}")


def check_caches(spec: CompressorSpec, caches: tuple[torch.Tensor, ...]) -> None:
    """Each uint8 [pages, page bytes or more], pages a multiple of 4 bytes apart; a second one where
    the record format has one, with as many pages as the first."""
    wanted = [spec.page_bytes, spec.second_page_bytes][: 1 + bool(spec.second_page_bytes)]
    if len(caches) != len(wanted):
        must, got = (["None", "a tensor"][count - 1] for count in (len(wanted), len(caches)))
        raise ValueError(f"second_cache must be {must} for {spec.cache_format}, got {got}")
    for name, cache, page_bytes in zip(_CACHES, caches, wanted, strict=False):
        expect_shape(name, cache, ("pages", "page bytes"))
        expect_dtype(name, cache, torch.uint8)
        expect_stride(name, cache, 1, 1)
        if cache.shape[1] < page_bytes:
            raise ValueError(
                f"{name} must have pages of at least {page_bytes} bytes ({spec.page_tokens} tokens "
                f"of {spec.cache_format}), got {cache.shape[1]}"
            )
        if cache.stride(0) % 4 or cache.data_ptr() % 4:
            raise ValueError(
                f"{name} must have pages aligned to 4 bytes, got stride {cache.stride(0)} "
                f"at address {cache.data_ptr()} mod 4 = {cache.data_ptr() % 4}"
            )
    if caches[-1].shape[0] != caches[0].shape[0]:
        raise ValueError(
            f"second_cache must have {caches[0].shape[0]} pages (as cache has), "
            f"got {caches[-1].shape[0]}"
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
