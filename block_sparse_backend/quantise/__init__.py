"""Quantisation as SageAttention2 has it: INT8 queries and smoothed keys, smoothed e4m3 values.

A path is a module, whose `bind` returns a `QuantisePath`. The caller's tensors are read alone,
whatever the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.predict import Pooled
from block_sparse_backend.spec import SageMode

E4M3_MAX = 448.0
TINY = 1e-35
"""Below it nothing has a scale: over 448 it is normal in float32, and so are reciprocals."""


@dataclass(frozen=True)
class Quantised:
    """Inputs as the 8-bit kernel takes them.

    Attributes:
        q: int8 [B, H, M, D]; k: int8 [B, Hkv, N, D], where there is an order [B, Hkv, N padded to
            block_n, D].
        v: e4m3 [B, Hkv, D, N padded to block_n], permuted as ``quantise_values_kernel`` says, or
            the caller's 16-bit [B, Hkv, N, D].
        q_scale: float32 [B, H, M].
        k_scale: float32 [B, Hkv, ceil(N / block_n), 4 spans]; a block has ``block_n /
            mode.span(block_n)`` spans. Of packed sequences the blocks are those of the plan.
        v_scale, v_offset: float32 [B, Hkv, D], the latter what is added to the output, mean(v -
            v_scale v8); ``None`` where values stay as they are.
        shift: float32 [B, H, M], what smooth keys took from every logit of a query; ``None`` of
            packed sequences.
        k_mean: float32 [B, Hkv, D], of packed sequences [S, Hkv, D].
        block_n: keys in a block.
        length: the number of keys, N.
        order: int8 [B, Hkv, ceil(N / block_n), block_n], of keys that are sorted within a block by
            their largest magnitude the token in each place; ``None`` where values stay as they are.
        q_top: float32 [B * H], the largest scale of a head's queries; k_top: float32 [B * Hkv], of
            packed sequences [S * Hkv], of keys.
    """

    mode: SageMode
    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor | None
    v_offset: Tensor | None
    shift: Tensor | None
    k_mean: Tensor
    block_n: int
    length: int
    order: Tensor | None
    q_top: Tensor
    k_top: Tensor


Quantise: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, float, BlockPlan | None], tuple[Quantised, Pooled | None]
]
"""Quantises q, k and v of calls that are laid out alike, for a scale of the logits and the plan of
packed sequences; with the sums of their blocks where these are asked for."""
QuantisePath: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Quantise]
"""Prepares the quantisation of tensors that are laid out as these, and of packed sequences whose
plan has as many key blocks and whose values stay in 16 bits. It keeps no tensor."""
