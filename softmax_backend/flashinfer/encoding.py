"""FlashInfer's positional encodings, which attention applies to a cache of plain keys.

A request's keys have the positions 0 to kv_len - 1; its last query stands at its last key.

    ROPE_LLAMA   dimension i and i + D / 2 of queries and keys turn by position / scale *
                 theta^(-2 i / D), rounded to their dtype
    ALIBI        slope of the head times (key's position - query's number in the request) is added
                 to the logits
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MODES = ("NONE", "ROPE_LLAMA", "ALIBI")


@dataclass(frozen=True)
class Encoding:
    """What ``plan`` was asked for.

    Attributes:
        mode: one of ``MODES``.
        scale, theta: of ROPE_LLAMA.
    """

    mode: str = "NONE"
    scale: float = 1.0
    theta: float = 1e4


def checked(
    mode: str,
    rope_scale: float | None,
    rope_theta: float | None,
    head_dim: int,
    soft_cap: float | None,
) -> Encoding:
    """The encoding of a plan; ``None`` are FlashInfer's defaults.

    Raises:
        ValueError: it is not one of FlashInfer's, or not served with this head size or soft cap.
    """
    if mode not in MODES:
        raise ValueError(f"pos_encoding_mode must be one of {MODES}, got {mode!r}")
    if mode == "ALIBI" and soft_cap:
        raise ValueError(
            f"logits_soft_cap must be 0 or None with ALIBI, got {soft_cap}: FlashInfer scales such "
            "logits twice"
        )
    if mode != "ROPE_LLAMA":
        return Encoding(mode)
    if head_dim & (head_dim - 1):
        raise ValueError(f"head_dim_qk must be a power of 2 with ROPE_LLAMA, got {head_dim}")
    scale = 1.0 if rope_scale is None else rope_scale
    theta = 1e4 if rope_theta is None else rope_theta
    for name, value in (("rope_scale", scale), ("rope_theta", theta)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    return Encoding(mode, scale, theta)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """float32 [H]: 2^(-8 i / n) for i from 1 to n, the largest power of 2 up to H; for the heads
    beyond n every second one of 2 n heads."""
    n = 1 << (num_heads.bit_length() - 1)
    first = [-8.0 * i / n for i in range(1, n + 1)]
    beyond = [-4.0 * i / n for i in range(1, 2 * (num_heads - n) + 1, 2)]
    return torch.tensor(first + beyond, dtype=torch.float64, device=device).exp2().float()


def rope_table(encoding: Encoding, length: int, head_dim: int, device: torch.device) -> Tensor:
    """float32 [length, 2, D / 2]: cosines, then sines, of each position."""
    i = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    frequency = encoding.theta ** (-2.0 * i / head_dim) / encoding.scale
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], 1).float()


def rotated(q: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Queries [T, H, D] turned by their positions, int64 [T]."""
    cos, sin = table[positions][:, None].unbind(2)
    low, high = q.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(q.dtype)
