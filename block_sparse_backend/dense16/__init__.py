"""The paths of attention over blocks in 16 bits: a module for each, whose `bind` returns a
`BlockSparsePath`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from block_sparse_backend.contract import BlockSparseInputs, check_kernel

BlockSparseRun: TypeAlias = Callable[[BlockSparseInputs], None]
"""Fills the output and the LSE of checked calls that are laid out alike."""


BlockSparsePath: TypeAlias = Callable[[BlockSparseInputs], BlockSparseRun]
"""Prepares the run of calls that are laid out as this one.

Raises:
    ValueError: kernels cannot read such tensors.
"""


def of_kernel(run: BlockSparseRun) -> BlockSparsePath:
    """The path of a kernel, which does not take all tensors that the operator takes."""

    def prepare(x: BlockSparseInputs) -> BlockSparseRun:
        check_kernel(x.q, x.k, x.v, x.plan)
        return run

    return prepare
