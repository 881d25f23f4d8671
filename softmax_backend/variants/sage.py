"""SageAttention2's quantisation: INT8 queries and keys, e4m3 values, all smoothed as asked.

Whatever the mode, the caller's tensors are read alone. ``dequantised`` gives back what the 8-bit
kernel multiplies, which is how the torch path and the tests see it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import triton
from torch import Tensor

from softmax_backend.kernels import quantise as kernels

E4M3_MAX = 448.0


@dataclass(frozen=True)
class SageMode:
    """How inputs are quantised.

    Attributes:
        groups: what shares a scale, ``"per_warp"`` (16 queries; one key block) or ``"per_thread"``
            (two queries of 16; a quarter of a key block), which is 1 to 12 % more accurate and 3
            to 16 % slower.
        levels: 127 for INT8, 7 for INT4's range. Hopper has no INT4 product: 7 shows INT4's
            accuracy and saves no time.
        smooth_q: take the mean query out; the kernel adds its product with every key back.
        smooth_v: take the mean value out; it is added to the output.
        fp8_values: values in e4m3, else as they come, in 16 bits.
    """

    groups: Literal["per_warp", "per_thread"] = "per_warp"
    levels: int = 127
    smooth_q: bool = False
    smooth_v: bool = True
    fp8_values: bool = True

    def __post_init__(self) -> None:
        if self.groups not in ("per_warp", "per_thread"):
            raise ValueError(f'groups must be "per_warp" or "per_thread", got {self.groups!r}')
        if self.levels not in (7, 127):
            raise ValueError(f"levels must be 127 (INT8) or 7 (INT4's range), got {self.levels}")


@dataclass(frozen=True)
class Quantised:
    """Inputs as the 8-bit kernel takes them.

    Attributes:
        q: int8 [B, H, M, D]; k: int8 [B, Hkv, N, D].
        v: e4m3 [B, Hkv, D, N padded to block_n], permuted as ``quantise_values_kernel`` says, or
            the caller's 16-bit [B, Hkv, N, D].
        q_scale: float32 [B, H, ceil(M / 16), 1 or 8]; k_scale: [B, Hkv, ceil(N / block_n), 1 or 4].
        v_scale, v_mean: float32 [B, Hkv, D]; 1 and 0 where values stay as they are.
        bias: float32 [B, H, N], the mean query's product with each smoothed key, where q is smooth.
        shift: float32 [B, H, M], what smooth keys took from every logit of a query.
        q_mean, k_mean: float32 [B, H, D] and [B, Hkv, D]; the first only where q is smooth.
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
    bias: Tensor | None = None
    q_mean: Tensor | None = field(default=None, repr=False)


def quantise(
    q: Tensor, k: Tensor, v: Tensor, mode: SageMode, scale: float, block_n: int, path: str
) -> Quantised:
    """Quantise [B, H, L, D] views; the arguments were checked.

    Args:
        scale: of the logits, for the LSE shift.
        block_n: keys in a block of the plan.
        path: ``"torch"`` or ``"triton"``.
    """
    run = _with_torch if path == "torch" else _with_triton
    return run(q, k, v, mode, scale, block_n)


def _with_triton(
    q: Tensor, k: Tensor, v: Tensor, mode: SageMode, scale: float, block_n: int
) -> Quantised:
    b, h, m, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    per_thread = mode.groups == "per_thread"
    new = q.new_empty
    k_mean = column_mean(k)
    q_mean = column_mean(q) if mode.smooth_q else None
    blocks, slices = -(-n // block_n), -(-m // 16)
    k8, q8 = new((b, hk, n, d), dtype=torch.int8), new((b, h, m, d), dtype=torch.int8)
    k_scale = new((b, hk, blocks, 4 if per_thread else 1), dtype=torch.float32)
    q_scale = new((b, h, slices, 8 if per_thread else 1), dtype=torch.float32)
    bias = new((b, h, n), dtype=torch.float32) if mode.smooth_q else None
    shift = new((b, h, m), dtype=torch.float32)
    shared = {"GROUP": h // hk, "D": d, "PER_THREAD": per_thread}
    kernels.quantise_keys_kernel[(blocks, b * hk)](
        k_ptr=k,
        k_mean_ptr=k_mean,
        q_mean_ptr=k_mean if q_mean is None else q_mean,
        out_ptr=k8,
        scale_ptr=k_scale,
        bias_ptr=k_scale if bias is None else bias,
        length=n,
        levels=float(mode.levels),
        **_strides(k),
        HEADS=hk,
        BLOCK=block_n,
        HAS_BIAS=mode.smooth_q,
        num_warps=8,
        **shared,
    )
    kernels.quantise_queries_kernel[(-(-m // 64), b * h)](
        q_ptr=q,
        q_mean_ptr=k_mean if q_mean is None else q_mean,
        k_mean_ptr=k_mean,
        out_ptr=q8,
        scale_ptr=q_scale,
        shift_ptr=shift,
        softmax_scale=scale,
        length=m,
        levels=float(mode.levels),
        **_strides(q),
        HEADS=h,
        BLOCK=64,
        HAS_MEAN=mode.smooth_q,
        num_warps=8,
        **shared,
    )
    v8, v_scale, v_mean = v, torch.ones_like(k_mean), torch.zeros_like(k_mean)
    if mode.fp8_values:
        mean, low, high = column_range(v)
        if mode.smooth_v:
            v_mean, low, high = mean, low - mean, high - mean
        v_scale = _value_scale(low, high)
        padded = blocks * block_n
        v8 = new((b, hk, d, padded), dtype=torch.float8_e4m3fn)
        kernels.quantise_values_kernel[(blocks, b * hk)](
            v_ptr=v,
            inverse_ptr=v_scale.reciprocal(),
            mean_ptr=v_mean,
            out_ptr=v8,
            length=n,
            padded=padded,
            **_strides(v),
            HEADS=hk,
            D=d,
            BLOCK=block_n,
            HAS_MEAN=mode.smooth_v,
            num_warps=8,
        )
    return Quantised(
        mode=mode,
        q=q8,
        k=k8,
        v=v8,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        v_mean=v_mean,
        shift=shift,
        k_mean=k_mean,
        block_n=block_n,
        bias=bias,
        q_mean=q_mean,
    )


def column_mean(x: Tensor) -> Tensor:
    """Mean over the tokens of [B, H, L, D]: float32 [B, H, D]."""
    return _column_stats(x, False)[0].sum(1).view(-1, x.shape[1], x.shape[3]) / x.shape[2]


def column_range(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, minimum and maximum over the tokens of [B, H, L, D]: float32 [B, H, D] each."""
    b, h, length, d = x.shape
    part = _column_stats(x, True)
    total, low, high = part[0].sum(1) / length, part[1].amin(1), part[2].amax(1)
    return total.view(b, h, d), low.view(b, h, d), high.view(b, h, d)


def _column_stats(x: Tensor, has_range: bool) -> Tensor:
    b, h, length, d = x.shape
    block = min(32, triton.next_power_of_2(length))
    chunk = max(block, 512)
    chunks = -(-length // chunk)
    shape = (3 if has_range else 1, b * h, chunks, d)
    part = torch.empty(shape, dtype=torch.float32, device=x.device)
    kernels.column_stats_kernel[(chunks, b * h)](
        x_ptr=x,
        stats_ptr=part,
        length=length,
        **_strides(x),
        HEADS=h,
        D=d,
        CHUNK=chunk,
        BLOCK=block,
        HAS_RANGE=has_range,
        num_warps=4,
    )
    return part


def _strides(x: Tensor) -> dict[str, int]:
    return dict(zip(("stride_b", "stride_h", "stride_n"), x.stride(), strict=False))


def _value_scale(low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(high, -low).clamp_min(1e-12) / E4M3_MAX


def _with_torch(
    q: Tensor, k: Tensor, v: Tensor, mode: SageMode, scale: float, block_n: int
) -> Quantised:
    """The same numbers in torch, which the kernels are tested against."""
    m, n = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    q32, k32, v32 = q.float(), k.float(), v.float()
    k_mean = k32.mean(2)
    shift = scale * (q32 @ k_mean.repeat_interleave(group, 1)[..., None])[..., 0]
    q_mean = q32.mean(2) if mode.smooth_q else None
    k32 = k32 - k_mean[:, :, None]
    bias = None
    if q_mean is not None:
        q32 = q32 - q_mean[:, :, None]
        keys = k32.repeat_interleave(group, 1)
        bias = (keys @ q_mean[..., None])[..., 0]
    per_thread = mode.groups == "per_thread"
    q_group, k_group = group_of(m, n, per_thread, block_n, q.device)
    q8, q_scale = _to_levels(q32, q_group, -(-m // 16) * (8 if per_thread else 1), mode.levels)
    k8, k_scale = _to_levels(k32, k_group, -(-n // block_n) * (4 if per_thread else 1), mode.levels)
    v8, v_scale, v_mean = v, torch.ones_like(k_mean), torch.zeros_like(k_mean)
    if mode.fp8_values:
        v_mean = v32.mean(2) if mode.smooth_v else v_mean
        centred = v32 - v_mean[:, :, None]
        v_scale = _value_scale(centred.amin(2), centred.amax(2))
        padded = torch.nn.functional.pad(centred / v_scale[:, :, None], (0, 0, 0, -n % block_n))
        place = permuted_tokens(padded.shape[2], q.device)
        v8 = padded[:, :, place].transpose(2, 3).contiguous().to(torch.float8_e4m3fn)
    q_scale, k_scale = (
        x.view(*x.shape[:2], -1, last)
        for x, last in ((q_scale, 8 if per_thread else 1), (k_scale, 4 if per_thread else 1))
    )
    return Quantised(
        mode=mode,
        q=q8,
        k=k8,
        v=v8,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        v_mean=v_mean,
        shift=shift,
        k_mean=k_mean,
        block_n=block_n,
        bias=bias,
        q_mean=q_mean,
    )


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


def _to_levels(x: Tensor, group: Tensor, groups: int, levels: int) -> tuple[Tensor, Tensor]:
    top = torch.zeros(*x.shape[:2], groups, device=x.device)
    index = group.expand(*x.shape[:2], -1)
    top.scatter_reduce_(2, index, x.abs().amax(3), "amax")
    scale = top / levels + 1e-7
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
    if x.q_mean is not None:
        q = q + x.q_mean[:, :, None]
    return q, k + x.k_mean[:, :, None], v
