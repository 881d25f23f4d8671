"""SageAttention2's quantisation: INT8 queries and smoothed keys, smoothed e4m3 values.

Whatever the mode, the caller's tensors are read alone. ``dequantised`` gives back what the 8-bit
kernel multiplies, which is how the torch path and the tests see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend_core.autocast import without_autocast
from block_sparse_backend.kernels import quantise as kernels
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.prepared import prepared
from block_sparse_backend.variants.column_stats import (
    E4M3_MAX,
    column_mean,
    value_offset,
    value_scales,
)
from block_sparse_backend.variants.pooled import Pooled

TINY = 1e-12


@dataclass(frozen=True)
class SageMode:
    """How inputs are quantised.

    Attributes:
        fp8_values: values in e4m3 without their mean, which is added to the output; else as they
            come, in 16 bits.
    """

    fp8_values: bool = True

    def span(self, block_n: int) -> int:
        """Keys of a block among which every fourth pair shares a scale; fewer make a call more
        accurate and slower."""
        return min(64 if self.fp8_values else 32, block_n)


@dataclass(frozen=True)
class Quantised:
    """Inputs as the 8-bit kernel takes them.

    Attributes:
        q: int8 [B, H, M, D]; k: int8 [B, Hkv, N, D].
        v: e4m3 [B, Hkv, D, N padded to block_n], permuted as ``quantise_values_kernel`` says, or
            the caller's 16-bit [B, Hkv, N, D].
        q_scale: float32 [B, H, M].
        k_scale: float32 [B, Hkv, ceil(N / block_n), 4 spans + 1], the last the largest of the
            others; a block has ``block_n / mode.span(block_n)`` spans. Of packed sequences the
            blocks are those of the plan.
        v_scale, v_offset: float32 [B, Hkv, D], the latter what is added to the output, mean(v -
            v_scale v8); ``None`` where values stay as they are.
        shift: float32 [B, H, M], what smooth keys took from every logit of a query; ``None`` of
            packed sequences.
        k_mean: float32 [B, Hkv, D], of packed sequences [S, Hkv, D].
        block_n: keys in a block.
    """

    mode: SageMode
    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor | None
    v_offset: Tensor | None
    shift: Tensor | None
    k_mean: Tensor
    block_n: int


def quantise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mode: SageMode,
    scale: float,
    block_n: int,
    path: str,
    pooled: Pooled | None = None,
    packed: BlockPlan | None = None,
) -> Quantised:
    """Quantise [B, H, L, D] views; the arguments were checked.

    Args:
        scale: of the logits, for the LSE shift.
        block_n: keys in a block of the plan.
        path: ``"torch"`` or ``"triton"``.
        pooled: filled on the way, from ``Pooled.empty`` with this ``block_n``; Triton alone.
        packed: the plan of packed sequences; Triton and values in 16 bits alone.
    """
    if path == "torch":
        assert pooled is None and packed is None
        return _with_torch(q, k, v, mode, scale, block_n)
    assert packed is None or not mode.fp8_values
    k_mean = column_mean(k, packed)
    k8, k_scale = _keys(k, k_mean, mode, block_n, pooled, packed)
    q8, q_scale, shift = _queries(q, k_mean, scale, pooled, packed is None)
    if not mode.fp8_values:
        return Quantised(mode, q8, k8, v, q_scale, k_scale, None, None, shift, k_mean, block_n)
    mean, v_scale, inverse = value_scales(v)
    v8, sums = _values(v, mean, inverse, block_n)
    offset = value_offset(sums, mean, v_scale, v.shape[2])
    return Quantised(mode, q8, k8, v8, q_scale, k_scale, v_scale, offset, shift, k_mean, block_n)


def _keys(
    k: Tensor,
    k_mean: Tensor,
    mode: SageMode,
    block_n: int,
    pooled: Pooled | None,
    packed: BlockPlan | None,
) -> tuple[Tensor, Tensor]:
    """INT8 keys and their scales."""
    b, hk, n, d = k.shape
    spans = None if packed is None else packed.key_blocks
    blocks = -(-n // block_n) if spans is None else len(spans)
    span = mode.span(block_n)
    k8 = k.new_empty((b, hk, n, d), dtype=torch.int8)
    k_scale = torch.empty(
        b, hk, blocks, 4 * (block_n // span) + 1, dtype=torch.float32, device=k.device
    )
    sums, likeness = (None, None) if pooled is None else (pooled.k_sums, pooled.k_likeness)
    constexprs = {
        "HEADS": hk,
        "D": d,
        "BLOCK": block_n,
        "SPAN": span,
        "HAS_POOL": sums is not None,
        "HAS_LIKENESS": likeness is not None,
    }
    prepared(kernels.quantise_keys_kernel, 8, "k", **constexprs).launch(
        (blocks * b * hk, 1, 1),
        k_ptr=k,
        k_mean_ptr=k_mean,
        out_ptr=k8,
        scale_ptr=k_scale,
        sums_ptr=k_scale if sums is None else sums,
        likeness_ptr=k_scale if likeness is None else likeness,
        spans_ptr=spans,
        length=n,
        blocks=blocks,
    )
    return k8, k_scale


def _queries(
    q: Tensor, k_mean: Tensor, scale: float, pooled: Pooled | None, has_shift: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """INT8 queries, their scales, and what smooth keys took from their logits."""
    b, h, m, d = q.shape
    block = 64 if pooled is None else pooled.block_m
    blocks = -(-m // block)
    q8 = q.new_empty((b, h, m, d), dtype=torch.int8)
    q_scale = torch.empty(b, h, m, dtype=torch.float32, device=q.device)
    shift = torch.empty_like(q_scale) if has_shift else None
    sums, likeness = (None, None) if pooled is None else (pooled.q_sums, pooled.q_likeness)
    constexprs = {
        "HEADS": h,
        "GROUP": h // k_mean.shape[1],
        "D": d,
        "BLOCK": block,
        "HAS_POOL": sums is not None,
        "HAS_LIKENESS": likeness is not None,
    }
    prepared(kernels.quantise_queries_kernel, 1, "q", **constexprs).launch(
        (blocks * b * h, 1, 1),
        q_ptr=q,
        k_mean_ptr=k_mean,
        out_ptr=q8,
        scale_ptr=q_scale,
        shift_ptr=shift,
        sums_ptr=q_scale if sums is None else sums,
        likeness_ptr=q_scale if likeness is None else likeness,
        softmax_scale=scale,
        length=m,
        blocks=blocks,
    )
    return q8, q_scale, shift


def _values(v: Tensor, mean: Tensor, inverse: Tensor, block_n: int) -> tuple[Tensor, Tensor]:
    """e4m3 values, as ``quantise_values_kernel`` orders them, and their sums over blocks."""
    b, hk, n, d = v.shape
    blocks = -(-n // block_n)
    v8 = v.new_empty((b, hk, d, blocks * block_n), dtype=torch.float8_e4m3fn)
    sums = mean.new_empty(b, hk, blocks, d)
    prepared(kernels.quantise_values_kernel, 8, "v", HEADS=hk, D=d, BLOCK=block_n).launch(
        (blocks * b * hk, 1, 1),
        v_ptr=v,
        inverse_ptr=inverse,
        mean_ptr=mean,
        out_ptr=v8,
        sums_ptr=sums,
        length=n,
        blocks=blocks,
    )
    return v8, sums


@without_autocast
def _with_torch(
    q: Tensor, k: Tensor, v: Tensor, mode: SageMode, scale: float, block_n: int
) -> Quantised:
    """The same numbers in torch, which the kernels are tested against."""
    m, n = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    q32, k32, v32 = q.float(), k.float(), v.float()
    k_mean = k32.mean(2)
    shift = scale * (q32 @ k_mean.repeat_interleave(group, 1)[..., None])[..., 0]
    k32 = k32 - k_mean[:, :, None]
    span = mode.span(block_n)
    blocks, scales_of = -(-n // block_n), 4 * (block_n // span)
    q8, q_scale = _to_int8(q32, torch.arange(m, device=q.device), m)
    k8, k_scale = _to_int8(k32, key_groups(n, span, q.device), blocks * scales_of)
    v8, v_scale, v_offset = v, None, None
    if mode.fp8_values:
        mean = v32.mean(2)
        centred = v32 - mean[:, :, None]
        v_scale = centred.abs().amax(2).clamp_min(TINY) / E4M3_MAX
        padded = torch.nn.functional.pad(centred / v_scale[:, :, None], (0, 0, 0, -n % block_n))
        place = permuted_tokens(padded.shape[2], q.device)
        v8 = padded[:, :, place].transpose(2, 3).contiguous().to(torch.float8_e4m3fn)
        v_offset = mean - v_scale * (v8.float().sum(3) / n)
    k_scale = k_scale.view(*k_scale.shape[:2], blocks, scales_of)
    k_scale = torch.cat([k_scale, k_scale.amax(3, keepdim=True)], 3)
    scales = (q_scale, k_scale, v_scale)
    return Quantised(mode, q8, k8, v8, *scales, v_offset, shift, k_mean, block_n)


def key_groups(n: int, span: int, device: torch.device) -> Tensor:
    """The number of the scale of each key: int64 [N]."""
    o_n = torch.arange(n, device=device)
    return o_n // span * 4 + o_n % 8 // 2


def permuted_tokens(length: int, device: torch.device) -> Tensor:
    """int64 [length]: the token in each place of the values."""
    place = torch.arange(length, device=device)
    r = place % 16
    return place - r + 8 * (r // 2 % 2) + 2 * (r // 4) + r % 2


def _to_int8(x: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    top = x.new_zeros(*x.shape[:2], groups)
    index = group.expand(*x.shape[:2], -1)
    top.scatter_reduce_(2, index, x.abs().amax(3), "amax")
    scale = (top / 127).clamp_min(TINY)
    return torch.round(x / scale.gather(2, index)[..., None]).to(torch.int8), scale


def dequantised(x: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in fp32 as the kernel's products see them, means added back."""
    n = x.k.shape[2]
    q = x.q.float() * x.q_scale[..., None]
    groups = key_groups(n, x.mode.span(x.block_n), x.q.device)
    k = x.k.float() * x.k_scale[..., :-1].flatten(2)[:, :, groups, None]
    v = x.v.float()
    if x.v_scale is not None and x.v_offset is not None:
        place = permuted_tokens(v.shape[3], v.device)
        v = v.transpose(2, 3)[:, :, torch.argsort(place)][:, :, :n]
        v = v * x.v_scale[:, :, None] + x.v_offset[:, :, None]
    return q, k + x.k_mean[:, :, None], v
