"""The paths of attention over blocks in 16 bits: a module for each, whose `bind` returns a
`BlockSparseRun`, which fills a checked call's output and LSE."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from block_sparse_backend.contract import BlockSparseInputs

BlockSparseRun: TypeAlias = Callable[[BlockSparseInputs], None]
