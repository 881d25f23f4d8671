"""SageAttention2's quantisation: INT8 queries and smoothed keys, smoothed e4m3 values.

Whatever the mode, the caller's tensors are read alone. ``dequantised`` gives back what the 8-bit
kernel multiplies, which is how the torch path and the tests see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from backend_core.autocast import without_autocast
from backend_core.ready import Ready
from block_sparse_backend.kernels import quantise as kernels
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.prepared import prepared
from block_sparse_backend.variants.column_stats import (
    E4M3_MAX,
    column_mean_of,
    partial_stats_of,
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
    block_m, has_likeness = 64, False
    if pooled is not None:
        block_m, has_likeness = pooled.block_m, pooled.q_likeness is not None
    blocks = None if packed is None else packed.key_blocks
    pool = (pooled is not None, has_likeness)
    run = _quantiser(q, k, v, mode, block_m, block_n, pool, blocks)
    return run(q, k, v, scale, pooled, packed)


_Quantise: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, float, Pooled | None, BlockPlan | None], Quantised
]


def _bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mode: SageMode,
    block_m: int,
    block_n: int,
    pool: tuple[bool, bool],
    key_blocks: Tensor | None,
) -> _Quantise:
    """What quantises such tensors in Triton.

    Args:
        block_m: queries of a tile.
        pool: whether sums of blocks are asked for, and likenesses.
        key_blocks: of packed sequences.
    """
    assert key_blocks is None or not mode.fp8_values
    (b, h, m, d), hk = q.shape, k.shape[1]
    n, has_shift = k.shape[2], key_blocks is None
    tiles, rows = -(-m // block_m), b * hk
    blocks = -(-n // block_n) if key_blocks is None else len(key_blocks)
    shape_q, shape_k, span = (b, h, m, d), (b, hk, n, d), mode.span(block_n)
    k_scales = (b, hk, blocks, 4 * (block_n // span) + 1)
    pools = {"HAS_POOL": pool[0], "HAS_LIKENESS": pool[1]}
    sizes = {"HEADS": hk, "D": d, "BLOCK": block_n}
    of_keys = prepared(kernels.quantise_keys_kernel, 8, "k", SPAN=span, **sizes, **pools).launch
    sizes_q = {"HEADS": h, "GROUP": h // hk, "D": d, "BLOCK": block_m}
    of_queries = prepared(kernels.quantise_queries_kernel, 1, "q", **sizes_q, **pools).launch
    mean_of = column_mean_of(k, key_blocks, block_n)
    finish = _bind_values(v, block_n) if mode.fp8_values else None
    int8 = functools.partial(torch.empty, dtype=torch.int8, device=q.device)
    fp32 = functools.partial(torch.empty, dtype=torch.float32, device=q.device)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        pooled: Pooled | None,
        packed: BlockPlan | None,
    ) -> Quantised:
        k_mean = mean_of(k, packed)
        k8, k_scale = int8(shape_k), fp32(k_scales)
        q8, q_scale = int8(shape_q), fp32((b, h, m))
        shift = fp32((b, h, m)) if has_shift else None
        k_sums = k_likeness = q_sums = q_likeness = q_scale
        if pooled is not None:
            k_sums, q_sums = pooled.k_sums, pooled.q_sums
            if pooled.k_likeness is not None and pooled.q_likeness is not None:
                k_likeness, q_likeness = pooled.k_likeness, pooled.q_likeness
        of_keys(
            (blocks * rows, 1, 1),
            k_ptr=k,
            k_mean_ptr=k_mean,
            out_ptr=k8,
            scale_ptr=k_scale,
            sums_ptr=k_sums,
            likeness_ptr=k_likeness,
            spans_ptr=None if packed is None else packed.key_blocks,
            length=n,
            blocks=blocks,
        )
        of_queries(
            (tiles * b * h, 1, 1),
            q_ptr=q,
            k_mean_ptr=k_mean,
            out_ptr=q8,
            scale_ptr=q_scale,
            shift_ptr=shift,
            sums_ptr=q_sums,
            likeness_ptr=q_likeness,
            softmax_scale=scale,
            length=m,
            blocks=tiles,
        )
        v8, v_scale, offset = (v, None, None) if finish is None else finish(v)
        scales = (q_scale, k_scale, v_scale)
        return Quantised(mode, q8, k8, v8, *scales, offset, shift, k_mean, block_n)

    return run


_quantiser = Ready(_bind)


def _bind_values(v: Tensor, block_n: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """What rounds such values to e4m3, as ``quantise_values_kernel`` orders them: of values, these,
    their scale and what is added to the output."""
    b, h, n, d = v.shape
    blocks, rows = -(-n // block_n), b * h
    statistics, parts = partial_stats_of(v, True, None, 0)
    small = {"D": d, "STEP": 32}
    scales_of = prepared(kernels.value_scales_kernel, 4, **small, E4M3_MAX=E4M3_MAX).launch
    rounded = prepared(kernels.quantise_values_kernel, 16, "v", HEADS=h, D=d, BLOCK=block_n).launch
    offset_of = prepared(kernels.value_offset_kernel, 4, **small).launch
    fp32 = functools.partial(torch.empty, dtype=torch.float32, device=v.device)
    fp8 = functools.partial(torch.empty, dtype=torch.float8_e4m3fn, device=v.device)

    def finish(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, scale, inverse, offset = (fp32((b, h, d)) for _ in range(4))
        grid = (rows, 1, 1)
        scales_of(
            grid,
            stats_ptr=statistics(v, None),
            mean_ptr=mean,
            scale_ptr=scale,
            inverse_ptr=inverse,
            parts=parts,
            length=n,
        )
        v8, sums = fp8((b, h, d, blocks * block_n)), fp32((rows, blocks, d))
        rounded(
            (blocks * rows, 1, 1),
            v_ptr=v,
            inverse_ptr=inverse,
            mean_ptr=mean,
            out_ptr=v8,
            sums_ptr=sums,
            length=n,
            blocks=blocks,
        )
        named = {"sums_ptr": sums, "mean_ptr": mean, "scale_ptr": scale, "offset_ptr": offset}
        offset_of(grid, **named, parts=blocks, length=n)
        return v8, scale, offset

    return finish


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
        v8 = _to_e4m3(padded[:, :, place], block_n).transpose(2, 3).contiguous()
        v_offset = mean - v_scale * (v8.float().sum(3) / n)
    k_scale = k_scale.view(*k_scale.shape[:2], blocks, scales_of)
    k_scale = torch.cat([k_scale, k_scale.amax(3, keepdim=True)], 3)
    scales = (q_scale, k_scale, v_scale)
    return Quantised(mode, q8, k8, v8, *scales, v_offset, shift, k_mean, block_n)


def _to_e4m3(x: Tensor, block: int) -> Tensor:
    """As in ``kernels.quantise``, of [B, H, blocks of tokens, D]."""
    tiles = x.reshape(*x.shape[:2], -1, block, x.shape[3])
    nearest = tiles.to(torch.float8_e4m3fn).float()
    left = tiles - nearest
    step = torch.exp2(torch.floor(torch.log2(nearest.abs().clamp_min(2.0**-6))) - 3)
    error = left.sum(3, keepdim=True)
    sign = torch.where(error > 0, 1.0, -1.0)
    least = 0.5 - error.abs() / step.sum(3, keepdim=True)
    step = torch.where(left * sign > least * step, step, 0.0)
    made_up = step.sum(3, keepdim=True) < 2.0 * error.abs()
    step = torch.where(made_up, step, 0.0)
    return (nearest + sign * step).reshape(x.shape).to(torch.float8_e4m3fn)


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
