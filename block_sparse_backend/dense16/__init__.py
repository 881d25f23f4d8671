"""The paths of attention over blocks in 16 bits: a module for each, whose `bind` returns a
`BlockSparsePath`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from block_sparse_backend.contract import BlockSparseInputs, check_kernel

BlockSparseRun: TypeAlias = Callable[[BlockSparseInputs], None]
"""Fills the output and the LSE of checked calls that are laid out alike."""


class BlockSparsePath:
    """One path, bound to a kind of call."""

    def __init__(self, run: BlockSparseRun, is_kernel: bool = True) -> None:
        self._run, self._is_kernel = run, is_kernel

    def prepare(self, x: BlockSparseInputs) -> BlockSparseRun:
        """What runs calls that are laid out as this one.

        Raises:
            ValueError: kernels cannot read such tensors.
        """
        if self._is_kernel:
            check_kernel(x.q, x.k, x.v, x.plan)
        return self._run
