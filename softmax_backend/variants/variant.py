"""Variants of softmax attention: what a kernel does with a block's logits.

A variant is a hook, a ``@triton.jit`` function that Triton inlines into the kernel, with its torch
counterpart for the CPU:

    logits(s, scale, q_pos, k_pos, head, aux, value) -> s       [BLOCK_M, BLOCK_N]

``logits`` gets the product q . k and gives what, times ``factor``, is the logit in base 2: where
``logits`` is ``products`` that is the product itself with factor = scale * log2(e); every other
hook gives base-2 logits and the factor is 1. Its results must be finite: leaving elements out is
the plan's mask. ``aux`` is one tensor of the variant's and ``value`` one number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softmax_backend.kernels import prefill_hooks as hooks

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Variant:
    """A hook and its data.

    Attributes:
        name: for messages and reports.
        logits: the Triton hook.
        torch_logits: (logits [M, N] with the scale, q_pos [M, 1], k_pos [1, N], head, aux, value)
            -> logits, natural. ``None`` where a user gave a kernel hook without one: then the torch
            path refuses the variant.
        aux: the hook's tensor, on the inputs' device.
        value: the hook's number.
    """

    name: str
    logits: Any
    torch_logits: Callable[..., Tensor] | None = None
    aux: Tensor | None = None
    value: float = 0.0

    def factor(self, scale: float) -> float:
        """What turns the results of ``logits`` into base-2 logits."""
        return scale * LOG2_E if self.logits is hooks.products else 1.0


SOFTMAX = Variant("softmax", hooks.products)


def soft_cap(cap: float) -> Variant:
    """Logits cap tanh(logits / cap)."""
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    return Variant(
        "soft_cap",
        hooks.soft_capped,
        torch_logits=lambda s, q, k, head, aux, value: value * torch.tanh(s / value),
        value=cap,
    )
