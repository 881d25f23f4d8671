"""The indexer's queries in the form in which its keys are cached.

Keys and queries meet in one product, so what is done to the one must be done to the other: both
take their rotation, format and rounding from one ``CompressorSpec``.
"""

from __future__ import annotations

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from backend_core.target import Target, detect_target
from dsv4_backend import reference, validation
from dsv4_backend import selection as paths
from dsv4_backend.spec import CompressorSpec

Queries = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def quantise_indexer_queries(
    spec: CompressorSpec,
    q: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    *,
    target: Target | None = None,
) -> Queries:
    """RoPE, the spec's rotation and its quantisation, and the weights of the heads' scores.

    A token's score of a key is sum_h weight_h · relu(q_h · k); the two scales, and of fp8 the scale
    of the head's row too, are multiplied into weight_h, as vLLM's logits kernels expect.

    Args:
        spec: of the indexer's keys.
        q: [T, H, 128] fp32 or bf16, last dimension contiguous.
        positions: [T] int32 or int64.
        rope_table: [positions, 64] in ``spec.rope_layout``.
        weights: [T, H] fp32 or bf16, last dimension contiguous.
        softmax_scale, head_scale: 128^-0.5 and H^-0.5 in the model.
        target: the processor to choose kernels for, by default that of ``q``.

    Returns:
        Codes uint8 [T, H, 128] of e4m3, or [T, H, 64] of e2m1 pairs; scales uint8 [T, H, 4] (UE8M0)
        of the latter, otherwise ``None``; weights fp32 [T, H].

    Raises:
        ValueError: an argument breaks this contract.
        LookupError: there are no kernel paths for the target.
    """
    _check(spec, q, positions, rope_table, weights)
    target = target or detect_target(q.device)
    tokens, heads, dim = q.shape
    launch = paths.query_paths(target, spec).launch(tokens * heads)
    if launch is None:
        return _reference(spec, q, positions, rope_table, weights, softmax_scale, head_scale)
    is_fp4 = spec.cache_format == "indexer_mxfp4"
    codes = q.new_empty(tokens, heads, dim // 2 if is_fp4 else dim, dtype=torch.uint8)
    scales = q.new_empty(tokens, heads, dim // 32, dtype=torch.uint8) if is_fp4 else None
    out = q.new_empty(tokens, heads, dtype=torch.float32)
    stride_q_t, stride_q_h, _ = q.stride()
    launch.kernel(
        (tokens, -(-heads // launch.heads), 1),
        q, positions, rope_table, weights, codes, codes if scales is None else scales, out,
        heads, softmax_scale, head_scale, stride_q_t, stride_q_h, rope_table.stride()[0],
        weights.stride()[0],
    )  # fmt: skip
    return codes, scales, out


def _check(
    spec: CompressorSpec,
    q: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    if spec.head_dim != 128:
        raise ValueError(f"spec must be an indexer's (head_dim 128), got {spec.head_dim}")
    expect_shape("q", q, ("T", "H", 128))
    expect_dtype("q", q, torch.float32, torch.bfloat16)
    expect_stride("q", q, 2, 1)
    (tokens, heads, _), device = q.shape, q.device
    validation.check_index("positions", positions, (tokens,), device)
    validation.check_rope_table("rope_table", rope_table, device)
    expect_shape("weights", weights, (tokens, heads))
    expect_dtype("weights", weights, torch.float32, torch.bfloat16)
    expect_stride("weights", weights, 1, 1)
    expect_device("weights", weights, device)


def _reference(
    spec: CompressorSpec,
    q: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> Queries:
    """In float64."""
    tokens, heads, dim = q.shape
    rows = reference.rope(
        q.double().reshape(-1, dim),
        rope_table,
        positions.repeat_interleave(heads),
        spec.rope_layout,
    )
    if spec.rotate:
        rows = reference.hadamard(rows)
    data, scales = reference.quantise(rows, spec)
    codes = data.view(tokens, heads, -1)
    out = weights.double() * softmax_scale * head_scale
    if spec.cache_format == "indexer_mxfp4":
        return codes, scales.view(tokens, heads, -1), out.float()
    scale = scales.contiguous().view(torch.float32).view(tokens, heads)
    return codes, None, (out * scale).float()
