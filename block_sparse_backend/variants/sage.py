"""SageAttention2's quantisation: INT8 queries and smoothed keys, smoothed e4m3 values.

Whatever the mode, the caller's tensors are read alone. ``dequantised`` gives back what the 8-bit
kernel multiplies, which is how the torch path and the tests see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from backend_core.autocast import without_autocast
from block_sparse_backend.kernels import quantise as kernels
from block_sparse_backend.prepared import prepared
from block_sparse_backend.variants.column_stats import E4M3_MAX, column_mean, value_scales
from block_sparse_backend.variants.pooled import Pooled

Groups = Literal["per_warp", "per_thread"]


@dataclass(frozen=True)
class SageMode:
    """How inputs are quantised.

    Attributes:
        groups: what shares a scale, ``"per_warp"`` (16 queries; one key block) or ``"per_thread"``
            (two queries of 16; a quarter of a key block), which is 1 to 12 % more accurate and 3
            to 16 % slower.
        fp8_values: values in e4m3 without their mean, which is added to the output; else as they
            come, in 16 bits.
    """

    groups: Groups = "per_warp"
    fp8_values: bool = True

    def __post_init__(self) -> None:
        if self.groups not in ("per_warp", "per_thread"):
            raise ValueError(f'groups must be "per_warp" or "per_thread", got {self.groups!r}')


@dataclass(frozen=True)
class Quantised:
    """Inputs as the 8-bit kernel takes them.

    Attributes:
        q: int8 [B, H, M, D]; k: int8 [B, Hkv, N, D].
        v: e4m3 [B, Hkv, D, N padded to block_n], permuted as ``quantise_values_kernel`` says, or
            the caller's 16-bit [B, Hkv, N, D].
        q_scale: float32 [B, H, ceil(M / 16), 1 or 8]; k_scale: [B, Hkv, ceil(N / block_n), 1 or 4].
        v_scale, v_mean: float32 [B, Hkv, D]; 1 and 0 where values stay as they are.
        shift: float32 [B, H, M], what smooth keys took from every logit of a query.
        k_mean: float32 [B, Hkv, D].
        block_n: keys in a group of scales.
    """

    mode: SageMode
    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    v_mean: Tensor
    shift: Tensor
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
    sequences: Tensor | None = None,
) -> Quantised:
    """Quantise [B, H, L, D] views; the arguments were checked.

    Args:
        scale: of the logits, for the LSE shift.
        block_n: keys in a block of the plan.
        path: ``"torch"`` or ``"triton"``.
        pooled: filled on the way, from ``Pooled.empty`` with this ``block_n``; Triton alone.
        sequences: ``BlockPlan.sequences`` where batch entry i is to be the packed sequence i, of at
            most L tokens; Triton and values in e4m3 alone.
    """
    if path == "torch":
        assert pooled is None and sequences is None
        return _with_torch(q, k, v, mode, scale, block_n)
    assert sequences is None or mode.fp8_values  # others stay where they are
    of_q, of_k = (None, None) if sequences is None else (sequences[:, 1:], sequences[:, 3:])
    k_mean = column_mean(k, of_k)
    k8, k_scale = _keys(k, k_mean, mode, block_n, pooled, of_k)
    q8, q_scale, shift = _queries(q, k_mean, mode, scale, pooled, of_q)
    v8, v_scale, v_mean = v, torch.ones_like(k_mean), torch.zeros_like(k_mean)
    if mode.fp8_values:
        v_mean, v_scale, inverse = value_scales(v, of_k)
        v8 = _values(v, v_mean, inverse, block_n, of_k)
    scales = (q_scale, k_scale, v_scale)
    return Quantised(mode, q8, k8, v8, *scales, v_mean, shift, k_mean, block_n)


def _keys(
    k: Tensor,
    k_mean: Tensor,
    mode: SageMode,
    block_n: int,
    pooled: Pooled | None,
    spans: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """INT8 keys and their scales."""
    b, hk, n, d = k.shape
    blocks = -(-n // block_n)
    per_thread = mode.groups == "per_thread"
    k8 = k.new_empty((b, hk, n, d), dtype=torch.int8)
    k_scale = torch.empty(
        b, hk, blocks, 4 if per_thread else 1, dtype=torch.float32, device=k.device
    )
    sums, likeness = (None, None) if pooled is None else (pooled.k_sums, pooled.k_likeness)
    constexprs = {
        "HEADS": hk,
        "D": d,
        "BLOCK": block_n,
        "PER_THREAD": per_thread,
        "HAS_POOL": sums is not None,
        "HAS_LIKENESS": likeness is not None,
    }
    prepared(kernels.quantise_keys_kernel, 8, "k", **constexprs).launch(
        (blocks, b * hk, 1),
        k_ptr=k,
        k_mean_ptr=k_mean,
        out_ptr=k8,
        scale_ptr=k_scale,
        sums_ptr=k_scale if sums is None else sums,
        likeness_ptr=k_scale if likeness is None else likeness,
        spans_ptr=spans,
        length=n,
    )
    return k8, k_scale


def _queries(
    q: Tensor,
    k_mean: Tensor,
    mode: SageMode,
    scale: float,
    pooled: Pooled | None,
    spans: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """INT8 queries, their scales, and what smooth keys took from their logits."""
    b, h, m, d = q.shape
    per_thread = mode.groups == "per_thread"
    block = 64 if pooled is None else pooled.block_m
    q8 = q.new_empty((b, h, m, d), dtype=torch.int8)
    q_scale = torch.empty(
        b, h, -(-m // 16), 8 if per_thread else 1, dtype=torch.float32, device=q.device
    )
    shift = q_scale.new_empty(b, h, m)
    sums, likeness = (None, None) if pooled is None else (pooled.q_sums, pooled.q_likeness)
    constexprs = {
        "HEADS": h,
        "GROUP": h // k_mean.shape[1],
        "D": d,
        "BLOCK": block,
        "PER_THREAD": per_thread,
        "HAS_POOL": sums is not None,
        "HAS_LIKENESS": likeness is not None,
    }
    prepared(kernels.quantise_queries_kernel, 1, "q", **constexprs).launch(
        (-(-m // block), b * h, 1),
        q_ptr=q,
        k_mean_ptr=k_mean,
        out_ptr=q8,
        scale_ptr=q_scale,
        shift_ptr=shift,
        sums_ptr=q_scale if sums is None else sums,
        likeness_ptr=q_scale if likeness is None else likeness,
        spans_ptr=spans,
        softmax_scale=scale,
        length=m,
    )
    return q8, q_scale, shift


def _values(v: Tensor, mean: Tensor, inverse: Tensor, block_n: int, spans: Tensor | None) -> Tensor:
    """e4m3 values, as ``quantise_values_kernel`` orders them."""
    b, hk, n, d = v.shape
    blocks = -(-n // block_n)
    v8 = v.new_empty((b, hk, d, blocks * block_n), dtype=torch.float8_e4m3fn)
    prepared(kernels.quantise_values_kernel, 8, "v", HEADS=hk, D=d, BLOCK=block_n).launch(
        (blocks, b * hk, 1),
        v_ptr=v,
        inverse_ptr=inverse,
        mean_ptr=mean,
        out_ptr=v8,
        spans_ptr=spans,
        length=n,
        padded=blocks * block_n,
    )
    return v8


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
    per_thread = mode.groups == "per_thread"
    q_group, k_group = group_of(m, n, per_thread, block_n, q.device)
    q8, q_scale = _to_int8(q32, q_group, -(-m // 16) * (8 if per_thread else 1))
    k8, k_scale = _to_int8(k32, k_group, -(-n // block_n) * (4 if per_thread else 1))
    v8, v_scale, v_mean = v, torch.ones_like(k_mean), torch.zeros_like(k_mean)
    if mode.fp8_values:
        v_mean = v32.mean(2)
        centred = v32 - v_mean[:, :, None]
        v_scale = centred.abs().amax(2).clamp_min(1e-12) / E4M3_MAX
        padded = torch.nn.functional.pad(centred / v_scale[:, :, None], (0, 0, 0, -n % block_n))
        place = permuted_tokens(padded.shape[2], q.device)
        v8 = padded[:, :, place].transpose(2, 3).contiguous().to(torch.float8_e4m3fn)
    q_scale, k_scale = (
        x.view(*x.shape[:2], -1, last)
        for x, last in ((q_scale, 8 if per_thread else 1), (k_scale, 4 if per_thread else 1))
    )
    scales = (q_scale, k_scale, v_scale)
    return Quantised(mode, q8, k8, v8, *scales, v_mean, shift, k_mean, block_n)


def group_of(
    m: int, n: int, per_thread: bool, block_n: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The number of the scale of each query and of each key, int64 [M] and [N]."""
    o_m, o_n = torch.arange(m, device=device), torch.arange(n, device=device)
    if not per_thread:
        return o_m // 16, o_n // block_n
    return o_m // 16 * 8 + o_m % 8, o_n // block_n * 4 + o_n % 8 // 2


def permuted_tokens(length: int, device: torch.device) -> Tensor:
    """int64 [length]: the token in each place of the values."""
    place = torch.arange(length, device=device)
    r = place % 16
    return place - r + 8 * (r // 2 % 2) + 2 * (r // 4) + r % 2


def _to_int8(x: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    top = x.new_zeros(*x.shape[:2], groups)
    index = group.expand(*x.shape[:2], -1)
    top.scatter_reduce_(2, index, x.abs().amax(3), "amax")
    scale = top / 127 + 1e-7
    return torch.round(x / scale.gather(2, index)[..., None]).to(torch.int8), scale


def dequantised(x: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in fp32 as the kernel's products see them, means added back."""
    m, n = x.q.shape[2], x.k.shape[2]
    per_thread = x.mode.groups == "per_thread"
    q_group, k_group = group_of(m, n, per_thread, x.block_n, x.q.device)
    q = x.q.float() * x.q_scale.flatten(2)[:, :, q_group, None]
    k = x.k.float() * x.k_scale.flatten(2)[:, :, k_group, None]
    v = x.v.float()
    if x.mode.fp8_values:
        place = permuted_tokens(v.shape[3], v.device)
        v = v.transpose(2, 3)[:, :, torch.argsort(place)][:, :, :n]
    v = v * x.v_scale[:, :, None] + x.v_mean[:, :, None]
    return q, k + x.k_mean[:, :, None], v
