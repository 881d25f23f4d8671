"""Attention over blocks in torch, of what the 8-bit kernel multiplies."""

from __future__ import annotations

from torch import Tensor

from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense8 import QuantisedRun
from block_sparse_backend.dense16 import torch as exact
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.spec import QuantisedSpec
from block_sparse_backend.variants.sage import Quantised, dequantised


def bind(row: KernelPath, spec: QuantisedSpec, target: Target) -> QuantisedRun:
    return run


def run(x: Quantised, plan: BlockPlan, scale: float, out: Tensor, lse: Tensor | None) -> None:
    assert lse is not None
    exact.run(BlockSparseInputs(*dequantised(x), plan, scale, out, lse))
