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
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
        return scale * LOG2_E if self.logits is products else 1.0


@triton.jit
def plain_key(k, k_pos, aux_ptr):
    return k


@triton.jit
def products(s, scale, q_pos, k_pos, head, aux_ptr, value):
    return s


@triton.jit
def softmax_update(s, high, total, factor, MASKED: tl.constexpr):
    """Online softmax in base 2: weights 2^(factor (s - high))."""
    new = tl.maximum(high, tl.max(s, 1))
    shift = new
    if MASKED:  # a row may have seen nothing yet
        shift = tl.where(new == -float("inf"), 0.0, new)
    alpha = tl.exp2((high - shift) * factor)
    p = tl.exp2(s * factor - (shift * factor)[:, None])
    return p, alpha, new, total * alpha + tl.sum(p, 1)


@triton.jit
def divide_by_sum(acc, high, total, factor, head, aux_ptr):
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _soft_cap(s, scale, q_pos, k_pos, head, aux_ptr, value):
    # value tanh(x / value) log2(e), with tanh(y) = 1 - 2 / (exp(2 y) + 1)
    turned = tl.exp2(s * (scale * 2.8853900817779268 / value))
    return (value * 1.4426950408889634) * (1.0 - 2.0 / (turned + 1.0))


@triton.jit
def _alibi(s, scale, q_pos, k_pos, head, aux_ptr, value):
    # aux: float32 [H], slopes
    slope = tl.load(aux_ptr + head)
    return (s * scale - slope * (q_pos - k_pos).to(tl.float32)) * 1.4426950408889634


@triton.jit
def _biased_logits(s, scale, q_pos, k_pos, head, aux_ptr, value):
    return (s * scale + value) * 1.4426950408889634


@triton.jit
def _sigmoid_update(s, high, total, factor, MASKED: tl.constexpr):
    """Weights 1 / (1 + 2^-s) that no sum divides; ``high`` and ``total`` are 0 and 1."""
    p = 1.0 / (1.0 + tl.exp2(-s * factor))
    alpha = tl.full(high.shape, 1.0, tl.float32)
    return p, alpha, tl.zeros(high.shape, tl.float32), alpha


@triton.jit
def _sink_output(acc, high, total, factor, head, aux_ptr):
    # aux: float32 [H], the sink's logit: a key with value 0 that every query sees
    empty = total == 0.0
    sink = tl.exp2(
        tl.load(aux_ptr + head) * 1.4426950408889634 - tl.where(empty, 0.0, high) * factor
    )
    return acc / tl.where(empty, 1.0, total + sink)[:, None]


@triton.jit
def _rotated_key(k, k_pos, aux_ptr):
    # aux: float32 [N, 2, D / 2], cosines then sines; the halves of a key are the pairs
    half: tl.constexpr = k.shape[1] // 2
    low, high = tl.split(tl.permute(tl.reshape(k.to(tl.float32), (k.shape[0], 2, half)), (0, 2, 1)))
    at = aux_ptr + k_pos[:, None].to(tl.int64) * (2 * half) + tl.arange(0, half)[None, :]
    cos, sin = tl.load(at), tl.load(at + half)
    turned = tl.join(low * cos - high * sin, high * cos + low * sin)
    return tl.reshape(tl.permute(turned, (0, 2, 1)), (k.shape[0], k.shape[1])).to(k.dtype)


def _torch_rotated(k: Tensor, k_pos: Tensor, aux: Tensor | None) -> Tensor:
    assert aux is not None
    cos, sin = aux[k_pos].to(k.dtype).unbind(1)
    low, high = k.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def _torch_sink(out: Tensor, lse: Tensor, head: int, aux: Tensor | None) -> Tensor:
    assert aux is not None
    return out * torch.sigmoid(lse - aux[head].to(lse.dtype))[:, None]


def _torch_alibi(s: Tensor, q: Tensor, k: Tensor, head: int, aux: Tensor, value: float) -> Tensor:
    return s - aux[head].to(s.dtype) * (q - k)


SOFTMAX = Variant("softmax", plain_key, products, softmax_update, divide_by_sum)


def soft_cap(cap: float) -> Variant:
    """Logits cap tanh(logits / cap)."""
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}")
    return Variant(
        "soft_cap",
        plain_key,
        _soft_cap,
        softmax_update,
        divide_by_sum,
        torch_logits=lambda s, q, k, head, aux, value: value * torch.tanh(s / value),
        value=cap,
    )


def alibi(slopes: Tensor) -> Variant:
    """Logits minus slope times the distance of query and key; ``slopes``: float32 [H]."""
    return Variant(
        "alibi",
        plain_key,
        _alibi,
        softmax_update,
        divide_by_sum,
        torch_logits=_torch_alibi,
        aux=slopes.float().contiguous(),
    )


def sigmoid(bias: float = 0.0) -> Variant:
    """Weights sigmoid(logits + bias), not normalised (arXiv 2409.04431). LSE is 0."""
    return Variant(
        "sigmoid",
        plain_key,
        _biased_logits,
        _sigmoid_update,
        divide_by_sum,
        torch_logits=lambda s, q, k, head, aux, value: s + value,
        torch_weights="sigmoid",
        value=bias,
    )


def sink(logits: Tensor) -> Variant:
    """One more key per head with logit ``logits`` (float32 [H]) and value 0; LSE is without it."""
    return Variant(
        "sink",
        plain_key,
        products,
        softmax_update,
        _sink_output,
        torch_output=_torch_sink,
        aux=logits.float().contiguous(),
    )


def rotated_keys(table: Tensor) -> Variant:
    """RoPE of the keys as they are loaded: ``table`` float32 [N, 2, D / 2], cosines then sines.

    The tile goes from shared memory to registers and back, which was measured to cost 22 % in
    prefill: rotate once beforehand unless the cache must hold plain keys.
    """
    return Variant(
        "rotated_keys",
        _rotated_key,
        products,
        softmax_update,
        divide_by_sum,
        torch_key=_torch_rotated,
        aux=table.float().contiguous(),
    )
