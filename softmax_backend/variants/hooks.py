"""The hooks of a variant and the variants that ship."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Logits = Callable[[torch.Tensor, float, float], torch.Tensor]
Mask = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]
Keys = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """Named hooks, in torch and in Triton. Two variants are the same where name and scalars are.

    Attributes:
        name: in messages.
        a, b: what the hooks get as their last arguments.
        logits: (scaled logits, a, b) -> logits, natural units.
        mask: (key positions, query positions, a, b) -> whether the key is seen; both are counted
            from the request's first token.
        keys: (latent keys, positions, a, b) -> keys; the values are the same tensor.
        kernel: the names of the three jit functions in ``kernels/variants.py``: logits, mask, keys.
    """

    name: str
    a: float = 0.0
    b: float = 0.0
    logits: Logits | None = field(default=None, compare=False)
    mask: Mask | None = field(default=None, compare=False)
    keys: Keys | None = field(default=None, compare=False)
    kernel: tuple[str, str, str] = ("same_logits", "full_mask", "same_key")

    def jit(self) -> tuple[Any, Any, Any]:
        """The three jit functions."""
        from softmax_backend.kernels import variants

        logits, mask, keys = self.kernel
        return getattr(variants, logits), getattr(variants, mask), getattr(variants, keys)


PLAIN = Variant("plain")
"""Softmax attention as it is."""


def soft_cap(cap: float) -> Variant:
    """Logits x become ``cap * tanh(x / cap)`` (Gemma 2, Grok).

    Raises:
        ValueError: the cap is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    return Variant(
        "soft_cap",
        a=cap,
        logits=lambda x, a, b: a * torch.tanh(x / a),
        kernel=("capped_logits", "full_mask", "same_key"),
    )


def sliding_window(window: int) -> Variant:
    """A query at position i sees the keys at i - window + 1 to i.

    Raises:
        ValueError: the window has no token.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    return Variant(
        "sliding_window",
        a=float(window),
        mask=lambda key, query, a, b: query - key < a,
        kernel=("same_logits", "window_mask", "same_key"),
    )
