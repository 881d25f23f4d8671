"""The gate regimes that accuracy and speed are stated for, under one name each.

random     A_log = log U(1, 16), dt_bias N(0, 1), raw gate N(0, 1)
init       A_log = log U(1, 16), dt_bias = softplus^-1 of log-uniform [1e-3, 1e-1], raw gate
           0.3 N(0, 1): transformers' initialisation
weak       A_log 0, dt_bias -5.5, raw gate 0.3 N(0, 1)
long       A_log N(1.3, 1.3) up to 5.3, dt_bias N(-3, 2), raw gate N(0, 3): a long tail of decays
extreme    exp(A_log) = 201, the largest of Kimi-Linear's checkpoint; two channels of three decay by
           up to e^-2661 per token and e^-6e4 per chunk, the third keeps its state
collinear  keys 1 % apart, beta ~ 1, decay ~ 1
steep      A_log 95, whose exponential is beyond fp32: a third of the channels have decays of all
           sizes, a third a softplus below fp32, a third a raw gate of exactly 0
"""

from __future__ import annotations

import math

import torch

REGIMES = ("random", "init", "weak", "long", "extreme", "collinear", "steep")
MEASURED_REGIMES = ("random", "init", "weak", "long", "collinear")
"""The regimes of the committed accuracy tables."""
HARD_REGIMES = ("random", "extreme", "collinear", "long")
"""The regimes of an adversarial call's heads: head h has the one of index h modulo their number."""


def gate_parameters(
    regime: str, raw: torch.Tensor, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(A_log [HV], dt_bias [HV, K], raw gate [T, HV, K]) of one regime.

    Args:
        raw: ``[T, HV, K]`` standard normal, on rng's device.

    Raises:
        ValueError: there is no such regime.
    """
    tokens, heads, channels = raw.shape

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=rng, device=rng.device)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, device=rng.device)

    def constant(value: float, *size: int) -> torch.Tensor:
        return torch.full(size, value, device=rng.device)

    if regime == "random":
        return (1.0 + 15.0 * uniform(heads)).log(), normal(heads, channels), raw
    if regime == "init":
        step = (math.log(1e-3) + uniform(heads, channels) * math.log(100.0)).exp()
        a_log = (1.0 + 15.0 * uniform(heads)).log()
        return a_log, step + torch.log(-torch.expm1(-step)), 0.3 * raw
    if regime == "weak":
        return constant(0.0, heads), constant(-5.5, heads, channels), 0.3 * raw
    if regime == "long":
        a_log = (1.3 + 1.3 * normal(heads)).clamp(max=5.3)
        return a_log, 2.0 * normal(heads, channels) - 3.0, 3.0 * raw
    if regime == "extreme":
        strong = torch.arange(channels, device=raw.device) % 3 > 0
        dt_bias = normal(heads, channels)
        dt_bias = torch.where(strong, 4.0 + dt_bias.abs(), dt_bias - 12.0)
        raw = torch.where(strong, 4.0 * raw, raw)
        if tokens:
            raw[tokens // 2, :, 1 % channels] = 14.0
        return constant(math.log(201.0), heads), dt_bias, raw
    if regime == "collinear":
        return constant(-5.0, heads), constant(-5.0, heads, channels), raw
    if regime == "steep":
        kind = torch.arange(channels, device=raw.device) % 3
        dt_bias = torch.where(kind == 0, 2.0 * normal(heads, channels) - 97.0, 0.0)
        dt_bias = torch.where(kind == 1, -300.0, dt_bias)
        return constant(95.0, heads), dt_bias, torch.where(kind == 2, 0.0, raw)
    raise ValueError(f"regime must be one of {', '.join(REGIMES)}, got {regime}")


def collinear(k: torch.Tensor, logit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[..., T, H, K]`` that differ by 1 %, and logits of beta that make it nearly 1."""
    return k[..., :1, :, :] + 0.01 * k, logit + 6.0
