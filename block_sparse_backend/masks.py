"""Mask hooks: which elements of a PARTIAL block are attended.

The Triton function of a mask is inlined into the kernel; it and its torch counterpart take

    mask(q_pos, k_pos, col, aux)  ->  bool, broadcastable to [BLOCK_M, BLOCK_N]

with ``q_pos`` [BLOCK_M, 1] and ``k_pos`` [1, BLOCK_N] the positions in the sequence, ``col`` the
key block and ``aux`` the plan's ``mask_aux``. The kernel itself leaves out keys beyond the
sequence's end.

A load in a hook should be of one scalar: a load of a vector of keys was measured to take the 8-bit
kernel from 168 registers to 255 with spills, and to halve its speed. The Gluon kernel takes none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from block_sparse_backend.kernels import hooks


@dataclass(frozen=True)
class Mask:
    """One mask hook.

    Attributes:
        name: for messages and reports.
        kernel: the ``@triton.jit`` function.
        torch: the same in torch; ``aux`` is the whole tensor.
    """

    name: str
    kernel: Any
    torch: Callable[[Tensor, Tensor, int, Tensor], Tensor]


everything = Mask("everything", hooks.everything_mask, lambda q, k, col, aux: (k >= 0) & (q == q))
causal = Mask("causal", hooks.causal_mask, lambda q, k, col, aux: k <= q)
block_end = Mask(
    "block_end", hooks.block_end_mask, lambda q, k, col, aux: (k < aux[col]) & (q == q)
)
