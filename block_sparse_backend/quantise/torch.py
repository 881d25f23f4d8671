"""Quantisation in torch, and the way back: what the 8-bit kernel multiplies."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from backend_core.autocast import without_autocast
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.predict import Pooled
from block_sparse_backend.predict.torch import pool
from block_sparse_backend.quantise import E4M3_MAX, TINY, Quantise, Quantised, QuantisePath
from block_sparse_backend.spec import QuantiseSpec


def bind(row: Row, spec: QuantiseSpec, target: Target) -> QuantisePath:
    return functools.partial(_prepare, spec)


def _prepare(
    spec: QuantiseSpec, q: Tensor, k: Tensor, v: Tensor, key_blocks: Tensor | None
) -> Quantise:
    return functools.partial(_quantise, spec)


@without_autocast
def _quantise(
    spec: QuantiseSpec, q: Tensor, k: Tensor, v: Tensor, scale: float, plan: BlockPlan | None
) -> tuple[Quantised, Pooled | None]:
    mode, block_n, (m, n) = spec.mode, spec.block_n, (q.shape[2], k.shape[2])
    q32, k32, v32 = q.float(), k.float(), v.float()
    if plan is None:
        k_mean = k32.mean(2)
        at_mean = k_mean.repeat_interleave(q.shape[1] // k.shape[1], 1)[..., None]
        shift: Tensor | None = scale * (q32 @ at_mean)[..., 0]
        k32 = k32 - k_mean[:, :, None]
    else:
        shift, spans = None, plan.sequences[:, 3:5].tolist()
        parts = [k32[:, :, first : first + count] for first, count in spans]
        k_mean = torch.cat([part.mean(2).nan_to_num(0.0) for part in parts])
        k32 = k32.clone()
        for (first, count), mean in zip(spans, k_mean, strict=True):
            k32[:, :, first : first + count] -= mean[:, None]
    q8, q_scale = _to_int8(q32, torch.arange(m, device=q.device), m)
    order = None
    if mode.fp8_values:
        order, k32 = _sorted(k32, block_n, mode.span(block_n))
    groups, (blocks, scales_of) = key_groups(k32, spec, plan)
    k8, k_scale = _to_int8(k32, groups, blocks * scales_of)
    v8, v_scale, v_offset = v, None, None
    if order is not None:
        mean = v32.mean(2)
        centred = v32 - mean[:, :, None]
        v_scale = centred.abs().amax(2).clamp_min(TINY) / E4M3_MAX
        padded = torch.nn.functional.pad(centred / v_scale[:, :, None], (0, 0, 0, -n % block_n))
        place = permuted_tokens(padded.shape[2], q.device)
        padded = padded.gather(2, _tokens(order)[:, :, place, None].expand_as(padded))
        v8 = _to_e4m3(padded, block_n).transpose(2, 3).contiguous()
        v_offset = mean - v_scale * (v8.float().sum(3) / n)
    k_scale = k_scale.view(*k_scale.shape[:2], blocks, scales_of)
    scales = (q_scale, k_scale, v_scale)
    tops = q_scale.amax(2).flatten(), k_scale.amax((2, 3)).flatten()
    x = Quantised(
        *(mode, q8, k8, v8, *scales, v_offset, shift, k_mean, block_n),
        length=n,
        order=order,
        q_top=tops[0],
        k_top=tops[1],
    )
    return x, pool(q, k, (spec.block_m, block_n)) if spec.has_pool else None


def _sorted(k: Tensor, block_n: int, span: int) -> tuple[Tensor, Tensor]:
    """The token of a block in each place, int8 [B, Hkv, blocks, block_n], and the keys there.

    Keys of a block are sorted by their largest magnitude, and as many as share a scale take the
    places of one scale after another.
    """
    n = k.shape[2]
    padded = torch.nn.functional.pad(k, (0, 0, 0, -n % block_n))
    top = padded.abs().amax(3)
    top[:, :, n:] = torch.inf
    by_rank = top.view(*top.shape[:2], -1, block_n).argsort(dim=3, stable=True)
    rank = torch.arange(block_n, device=k.device)
    group, w = rank // (span // 4), rank % (span // 4)
    place = group // 4 * span + 8 * (w // 2) + group % 4 * 2 + w % 2
    order = torch.empty_like(by_rank)
    order[..., place] = by_rank
    return order.to(torch.int8), padded.gather(2, _tokens(order)[..., None].expand_as(padded))


def _tokens(order: Tensor) -> Tensor:
    """The token in each place of all blocks, int64 [B, Hkv, blocks * block_n]."""
    blocks, block_n = order.shape[2:]
    first = block_n * torch.arange(blocks, device=order.device)
    return (order.long() + first[:, None]).flatten(2)


def key_groups(
    k: Tensor, spec: QuantiseSpec | Quantised, plan: BlockPlan | None
) -> tuple[Tensor, tuple[int, int]]:
    """The number of the scale of each key, int64 [N]; and the number of blocks and of scales of
    a block. Keys of no sequence have any scale.

    Args:
        plan: of packed sequences.
    """
    n, span = k.shape[2], spec.mode.span(spec.block_n)
    scales_of = 4 * (spec.block_n // span)
    number = torch.arange(n, device=k.device)
    if plan is None or plan.key_blocks is None:
        return number // span * 4 + number % 8 // 2, (-(-n // spec.block_n), scales_of)
    groups = torch.zeros_like(number)
    for block, (first, count, _) in enumerate(plan.key_blocks.tolist()):
        inside = number[:count]
        groups[first : first + count] = block * scales_of + inside // span * 4 + inside % 8 // 2
    return groups, (len(plan.key_blocks), scales_of)


def _to_e4m3(x: Tensor, block: int) -> Tensor:
    """Round [B, H, blocks of tokens, D] to e4m3 as ``kernels.quantise`` does."""
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


def dequantised(x: Quantised, plan: BlockPlan | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in fp32 as the kernel's products see them, means added back; of packed sequences
    keys stay without their mean, which no output shows.

    Args:
        plan: of packed sequences.
    """
    n = x.length
    q = x.q.float() * x.q_scale[..., None]
    groups, _ = key_groups(x.k, x, plan)
    k = x.k.float() * x.k_scale.flatten(2)[:, :, groups, None]
    v = x.v.float()
    if x.v_scale is not None and x.v_offset is not None and x.order is not None:
        back = torch.argsort(_tokens(x.order), dim=2)[:, :, :n, None]
        k = k.gather(2, back.expand(-1, -1, -1, k.shape[3]))
        place = permuted_tokens(v.shape[3], v.device)
        v = v.transpose(2, 3)[:, :, torch.argsort(place)]
        v = v.gather(2, back.expand(-1, -1, -1, v.shape[3]))
        v = v * x.v_scale[:, :, None] + x.v_offset[:, :, None]
    return q, k if x.shift is None else k + x.k_mean[:, :, None], v
