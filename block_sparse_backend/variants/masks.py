"""Mask hooks: which elements of a PARTIAL block are attended.

The Triton function of a mask is inlined into the kernel; it and its torch counterpart take

    mask(q_pos, k_pos, col, slot, head, aux)  ->  bool, broadcastable to [BLOCK_M, BLOCK_N]

with ``q_pos`` [BLOCK_M, 1] and ``k_pos`` [1, BLOCK_N] the positions in the sequence, ``col`` the
key block, ``slot`` the number of the PARTIAL block where the plan counts them, ``head`` the query
head and ``aux`` the plan's ``mask_aux``. The kernel itself leaves out keys beyond the sequence's
end.

A load in a hook should be of one scalar: a load of a vector of keys was measured to take the 8-bit
kernel from 168 registers to 255 with spills, and to halve its speed. ``element_bits`` is the
general mask and pays that price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from block_sparse_backend.kernels import prefill_hooks as hooks


@dataclass(frozen=True)
class Mask:
    """One mask hook.

    Attributes:
        name: for messages and reports.
        kernel: the ``@triton.jit`` function.
        torch: the same in torch; ``aux`` is the whole tensor.
        reads_vectors: the hook loads more than scalars, which the Gluon kernel does not take.
    """

    name: str
    kernel: Any
    torch: Callable[[Tensor, Tensor, int, int, int, Tensor], Tensor]
    reads_vectors: bool = False


def _torch_bits(q: Tensor, k: Tensor, col: int, slot: int, head: int, aux: Tensor) -> Tensor:
    o_n = torch.arange(k.shape[1], device=k.device)
    words = aux[slot, : q.shape[0]]
    return (words[:, o_n // 32] >> (o_n % 32)) & 1 != 0


everything = Mask(
    "everything", hooks.everything_mask, lambda q, k, col, slot, head, aux: (k >= 0) & (q == q)
)
causal = Mask("causal", hooks.causal_mask, lambda q, k, col, slot, head, aux: k <= q)
block_end = Mask(
    "block_end", hooks.block_end_mask, lambda q, k, col, slot, head, aux: (k < aux[col]) & (q == q)
)
element_bits = Mask("element_bits", hooks.element_bits_mask, _torch_bits, reads_vectors=True)
