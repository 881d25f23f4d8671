"""The gate regimes that accuracy and speed are stated for (docs/kda.md, Accuracy)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Draw = Callable[..., torch.Tensor]
REGIMES = ("random", "init", "weak", "long", "collinear")


def gate_parameters(
    regime: str, heads: int, channels: int, normal: Draw, uniform: Draw
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(A_log [heads], dt_bias [heads, channels], factor of a standard normal raw gate).

    Args:
        normal, uniform: draw a tensor of the given sizes from N(0, 1) and from [0, 1).

    Raises:
        ValueError: there is no such regime.
    """
    if regime == "random":
        return (uniform(heads) * 15 + 1).log(), normal(heads, channels), 1.0
    if regime == "init":
        a_log = (uniform(heads) * 15 + 1).log()
        dt = (uniform(heads, channels) * math.log(100.0) + math.log(1e-3)).exp()
        return a_log, dt + torch.log(-torch.expm1(-dt)), 0.3
    if regime == "weak":
        return 0 * uniform(heads), 0 * uniform(heads, channels) - 5.5, 0.3
    if regime == "long":
        return (normal(heads) * 1.3 + 1.3).clamp(max=5.3), normal(heads, channels) * 2 - 3, 3.0
    if regime == "collinear":
        return 0 * uniform(heads) - 5.0, 0 * uniform(heads, channels) - 5.0, 1.0
    raise ValueError(f"regime must be one of {', '.join(REGIMES)}, got {regime}")


def collinear(k: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [..., T, H, K] that differ by 1 %, and logits of beta that make it nearly 1."""
    return k[..., :1, :, :] + 0.01 * k, beta + 6
