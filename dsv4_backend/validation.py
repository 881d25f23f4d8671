"""The contract of the compressor's operators, stated once; every message says expected and got.

Only what the host knows is checked: shapes, dtypes, strides and devices. Values on the device
(rows, slots, positions) are not read; what each sentinel does is documented with the plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride

if TYPE_CHECKING:
    from dsv4_backend.spec import CompressorLayer, CompressorSpec
    from dsv4_backend.step_plan import (
        DecodePlan,
        PagedDecode,
        PagedPrefill,
        PrefillPlan,
        RowPlan,
        SeqLens,
    )

_ROWS = (torch.float32, torch.bfloat16)
_HEAD_DIM_OF = {
    "fp8_ds_mla": 512,
    "bf16_rows": 512,
    "fp8_rows": 512,
    "indexer_fp8": 128,
    "indexer_mxfp4": 128,
}


def check_spec(spec: CompressorSpec) -> None:
    _expect_one_of("head_dim", spec.head_dim, (128, 512))
    _expect_one_of("compress_ratio", spec.compress_ratio, (4, 128))
    _expect_one_of("cache_format", spec.cache_format, tuple(_HEAD_DIM_OF))
    _expect_one_of("rounding", spec.rounding, ("official", "sglang", "vllm"))
    _expect_one_of("fp8", spec.fp8, ("ocp", "fnuz"))
    _expect_one_of("rope_layout", spec.rope_layout, ("interleaved", "split"))
    _expect_positive("page_tokens", spec.page_tokens)
    _expect_positive("eps", spec.eps)
    wanted = _HEAD_DIM_OF[spec.cache_format]
    if spec.head_dim != wanted:
        raise ValueError(
            f"cache_format {spec.cache_format} must have head_dim {wanted}, got {spec.head_dim}"
        )
    if (spec.head_dim, spec.compress_ratio) == (128, 128):
        raise ValueError("head_dim 128 must have compress_ratio 4, got 128")
    if spec.rotate and spec.head_dim != 128:
        raise ValueError(f"rotate must go with head_dim 128, got {spec.head_dim}")


def check_layer(layer: CompressorLayer) -> None:
    spec = layer.spec
    expect_shape("ape", layer.ape, (spec.compress_ratio, spec.halves, spec.head_dim))
    expect_dtype("ape", layer.ape, *_ROWS)
    expect_stride("ape", layer.ape, 2, 1)
    _check_norm(layer.norm_weight, spec.head_dim, layer.ape.device)
    check_rope_table("rope_table", layer.rope_table, layer.ape.device)
    _expect_positive("fp8_scale", layer.fp8_scale)


def check_rope_table(name: str, table: torch.Tensor, device: torch.device) -> None:
    expect_shape(name, table, ("positions", 64))
    expect_dtype(name, table, *_ROWS)
    expect_stride(name, table, 1, 1)
    expect_device(name, table, device)


def check_index(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | str, ...],
    device: torch.device | None = None,
) -> None:
    """An int32 or int64 tensor of ``shape``, contiguous, on ``device`` if one is given."""
    expect_shape(name, tensor, shape)
    expect_dtype(name, tensor, torch.int32, torch.int64)
    _expect_contiguous(name, tensor)
    if device is not None:
        expect_device(name, tensor, device)


def check_plan_bytes(name: str, plan: torch.Tensor, width: int) -> None:
    expect_shape(name, plan, ("N", width))
    _expect_contiguous(name, plan)


def check_paged(plan: PagedDecode | PagedPrefill) -> None:
    check_index("positions", plan.positions, ("T",))
    tokens, device = plan.positions.shape[0], plan.positions.device
    check_index("state_slots", plan.state_slots, (tokens,), device)
    check_index("requests", plan.requests, (tokens,), device)
    check_index("slots", plan.slots, (tokens,), device)
    expect_shape("block_table", plan.block_table, ("B", "blocks"))
    expect_dtype("block_table", plan.block_table, torch.int32)
    expect_stride("block_table", plan.block_table, 1, 1)
    expect_device("block_table", plan.block_table, device)


def check_in_place(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rope_table: torch.Tensor,
    plan: SeqLens | RowPlan,
    head_dim: int,
    compress_ratio: int,
    rotate: bool,
) -> None:
    """The contract of ``compress_norm_rope_hadamard_``."""
    _expect_one_of("head_dim", head_dim, (128, 512))
    _expect_one_of("compress_ratio", compress_ratio, (4, 128))
    if not isinstance(rotate, bool):
        raise ValueError(f"rotate must be a bool, got {rotate!r}")
    _expect_positive("eps", eps)
    expect_shape("kv", kv, ("rows", head_dim))
    expect_dtype("kv", kv, *_ROWS)
    expect_stride("kv", kv, 1, 1)
    _check_norm(weight, head_dim, kv.device, name="weight")
    check_rope_table("freqs_cis", rope_table, kv.device)
    if getattr(plan, "layout", None) != "rows":
        raise ValueError(f"plan must be SeqLens or RowPlan, got {type(plan).__name__}")
    if plan.device != kv.device:
        raise ValueError(f"plan must be on {kv.device} (as kv is), got {plan.device}")
    if plan.phase == "decode" and plan.num_tokens > kv.shape[0]:
        raise ValueError(
            f"seq_lens must have at most {kv.shape[0]} entries (rows of kv), got {plan.num_tokens}"
        )


def check_step(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    plan: DecodePlan | PrefillPlan,
    phase: str,
) -> None:
    """The contract of one part's step, decode or prefill."""
    spec, device = layer.spec, layer.ape.device
    if getattr(plan, "layout", None) not in ("ring", "ring_v1", "paged") or plan.phase != phase:
        raise ValueError(f"plan must be a {phase} plan of metadata, got {type(plan).__name__}")
    state_block: dict[str, int | str] = {
        "ring": spec.compress_ratio,
        "ring_v1": spec.window,
        "paged": "block",
    }
    expect_shape("kv_score", kv_score, ("T", spec.row_width))
    if kv_score.shape[0] < plan.num_tokens:
        raise ValueError(
            f"kv_score must have at least {plan.num_tokens} rows (tokens of the plan), "
            f"got {kv_score.shape[0]}"
        )
    expect_dtype("kv_score", kv_score, *_ROWS)
    expect_stride("kv_score", kv_score, 1, 1)
    expect_shape("state", state, ("pages", state_block[plan.layout], spec.row_width))
    expect_dtype("state", state, *_ROWS)
    expect_stride("state", state, 2, 1)
    check_cache(spec, cache)
    for name, where in (
        ("kv_score", kv_score.device),
        ("state", state.device),
        ("cache", cache.device),
        ("plan", plan.device),
    ):
        if where != device:
            raise ValueError(f"{name} must be on {device} (as ape is), got {where}")


def check_cache(spec: CompressorSpec, cache: torch.Tensor) -> None:
    """uint8 [pages, page bytes or more], pages any multiple of 16 bytes apart."""
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


def check_pair(main: CompressorLayer, indexer: CompressorLayer) -> None:
    """What a main and an indexer compressor must share to run in one launch."""
    first, second = main.spec, indexer.spec
    if (first.head_dim, second.head_dim) != (512, 128):
        raise ValueError(
            "a pair must have head_dim 512 (main) and 128 (indexer), got "
            f"{first.head_dim} and {second.head_dim}"
        )
    if first.compress_ratio != 4:
        raise ValueError(f"a pair must have compress_ratio 4, got {first.compress_ratio}")
    for name in ("compress_ratio", "rounding", "fp8", "rope_layout", "eps"):
        _expect_equal(f"{name} of a pair", getattr(first, name), getattr(second, name))
    if main.rope_table.data_ptr() != indexer.rope_table.data_ptr():
        raise ValueError("rope_table of a pair must be one tensor, got two")


def check_pair_plans(main_plan: DecodePlan, indexer_plan: DecodePlan) -> None:
    if main_plan is indexer_plan:
        return
    if type(main_plan) is not type(indexer_plan):
        _expect_equal("plan of a pair", type(main_plan).__name__, type(indexer_plan).__name__)
    _expect_equal("plan length of a pair", main_plan.num_tokens, indexer_plan.num_tokens)
    first, second = getattr(main_plan, "requests", None), getattr(indexer_plan, "requests", None)
    if first is second:
        return
    if first is not None and second is not None and first.data_ptr() != second.data_ptr():
        raise ValueError("requests of a pair's plans must be one tensor, got two")


def _check_norm(
    weight: torch.Tensor, head_dim: int, device: torch.device, name: str = "norm_weight"
) -> None:
    expect_shape(name, weight, (head_dim,))
    expect_dtype(name, weight, *_ROWS)
    expect_stride(name, weight, 0, 1)
    expect_device(name, weight, device)


def _expect_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        wanted = " or ".join(str(choice) for choice in allowed)
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _expect_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")


def _expect_equal(name: str, first: object, second: object) -> None:
    if first != second:
        raise ValueError(f"{name} must be the same, got {first!r} (main), {second!r} (indexer)")


def _expect_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
