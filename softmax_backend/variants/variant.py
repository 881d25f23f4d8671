"""Variants of softmax attention: what a kernel does with a block's logits, and with its output.

A variant is a set of hooks, ``@triton.jit`` functions that Triton inlines into the kernel, each
with its torch counterpart for the CPU:

    key(k, k_pos, aux)                              -> k        the loaded keys [BLOCK_N, D]
    logits(s, scale, q_pos, k_pos, head, aux, value) -> s       [BLOCK_M, BLOCK_N]
    update(s, high, total, factor, MASKED)          -> p, alpha, high, total
    output(acc, high, total, factor, head, aux)     -> out      [BLOCK_M, DV], fp32

``logits`` gets the product q . k and gives what, times ``factor``, is the logit in base 2: where
``logits`` is ``products`` that is the product itself with factor = scale * log2(e); every other
hook gives base-2 logits and the factor is 1. Its results must be finite: leaving elements out is
the plan's mask. ``update`` turns them into weights, with the running maximum ``high`` (before the
factor) and sum ``total``; ``alpha`` rescales what was summed before. ``aux`` is one tensor of the
variant's and ``value`` one number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from softmax_backend.kernels import prefill_hooks as hooks

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Variant:
    """The hooks of one variant, and their data.

    Attributes:
        name: for messages and reports.
        key, logits, update, output: the Triton hooks.
        torch_key: (k [N, D], k_pos [N], aux) -> k.
        torch_logits: (logits [M, N] with the scale, q_pos [M, 1], k_pos [1, N], head, aux, value)
            -> logits, natural. ``None`` where a user gave a kernel hook without one: then the torch
            path refuses the variant.
        torch_weights: ``"softmax"`` or ``"sigmoid"``.
        torch_output: (out [M, DV], lse [M], head, aux) -> out.
        aux: the hooks' tensor, on the inputs' device.
        value: the hooks' number.
    """

    name: str
    key: Any
    logits: Any
    update: Any
    output: Any
    torch_key: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    torch_logits: Callable[..., Tensor] | None = None
    torch_weights: str = "softmax"
    torch_output: Callable[[Tensor, Tensor, int, Tensor | None], Tensor] | None = None
    aux: Tensor | None = None
    value: float = 0.0

    def factor(self, scale: float) -> float:
        """What turns the results of ``logits`` into base-2 logits."""
        return scale * LOG2_E if self.logits is hooks.products else 1.0


def _torch_rotated(k: Tensor, k_pos: Tensor, aux: Tensor | None) -> Tensor:
    assert aux is not None
    cos, sin = aux[k_pos].to(k.dtype).unbind(1)
    low, high = k.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _torch_sink(out: Tensor, lse: Tensor, head: int, aux: Tensor | None) -> Tensor:
    assert aux is not None
    share = torch.sigmoid(lse - aux[head].to(lse.dtype))
    return out * torch.where(lse == -torch.inf, 0.0, share)[:, None]  # also without a sink, -inf


def _torch_alibi(s: Tensor, q: Tensor, k: Tensor, head: int, aux: Tensor, value: float) -> Tensor:
    return s - aux[head].to(s.dtype) * (q - k)


SOFTMAX = Variant(
    "softmax", hooks.plain_key, hooks.products, hooks.softmax_update, hooks.divide_by_sum
)


def soft_cap(cap: float) -> Variant:
    """Logits cap tanh(logits / cap)."""
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    return Variant(
        "soft_cap",
        hooks.plain_key,
        hooks.soft_capped,
        hooks.softmax_update,
        hooks.divide_by_sum,
        torch_logits=lambda s, q, k, head, aux, value: value * torch.tanh(s / value),
        value=cap,
    )


def alibi(slopes: Tensor) -> Variant:
    """Logits minus slope times the distance of query and key; ``slopes``: float32 [H]."""
    return Variant(
        "alibi",
        hooks.plain_key,
        hooks.alibi_biased,
        hooks.softmax_update,
        hooks.divide_by_sum,
        torch_logits=_torch_alibi,
        aux=slopes.float().contiguous(),
    )


def sigmoid(bias: float = 0.0) -> Variant:
    """Weights sigmoid(logits + bias), not normalised (arXiv 2409.04431). LSE is 0."""
    return Variant(
        "sigmoid",
        hooks.plain_key,
        hooks.biased,
        hooks.sigmoid_update,
        hooks.divide_by_sum,
        torch_logits=lambda s, q, k, head, aux, value: s + value,
        torch_weights="sigmoid",
        value=bias,
    )


def sink(logits: Tensor, base: Variant = SOFTMAX) -> Variant:
    """One more key per head with logit ``logits`` (float32 [H]) and value 0; LSE is without it.

    Args:
        base: what is done with the keys and logits before.

    Raises:
        ValueError: ``base`` has a tensor of its own, or its weights are not a softmax.
    """
    if base.update is not hooks.softmax_update:
        raise ValueError(f"base must have softmax weights for a sink, got {base.name}")
    return replace(
        _free(base, "sink"),
        name="sink" if base is SOFTMAX else f"{base.name} with sink",
        output=hooks.divide_with_sink,
        torch_output=_torch_sink,
        aux=logits.float().contiguous(),
    )


def rotated_keys(table: Tensor, base: Variant = SOFTMAX) -> Variant:
    """RoPE of the keys as they are loaded, the halves of a key being the pairs.

    It is copied, with rows of zeros after it for the block of 128 keys in which the last one lies.
    The tile goes from shared memory to registers and back, which was measured to cost 22 % in
    prefill: rotate once beforehand unless the cache must hold plain keys.

    Args:
        table: float32 [N, 2, D / 2], cosines then sines, for D a power of 2 and as many positions
            as the last block of keys reaches, also beyond the sequence.
        base: what is done with the logits and the output.

    Raises:
        ValueError: the table is of another shape, or ``base`` has a tensor of its own.
    """
    half = table.shape[-1]
    if table.dim() != 3 or table.shape[1] != 2 or half & (half - 1):
        raise ValueError(
            f"table must have shape [N, 2, D / 2] with D a power of 2, got {list(table.shape)}"
        )
    return replace(
        _free(base, "rotated_keys"),
        name="rotated_keys" if base is SOFTMAX else f"{base.name} of rotated keys",
        key=hooks.rotated_key,
        torch_key=_torch_rotated,
        aux=torch.nn.functional.pad(table.float(), (0, 0, 0, 0, 0, 127)),
    )


def _free(base: Variant, name: str) -> Variant:
    if base.aux is not None:
        raise ValueError(f"base of {name} must have no tensor of its own, got {base.name}")
    return base
