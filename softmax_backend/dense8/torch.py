"""Attention over blocks in torch, of what the 8-bit kernel multiplies."""

from __future__ import annotations

from torch import Tensor

from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from softmax_backend.contract.block_sparse import BlockSparseInputs
from softmax_backend.dense8 import QuantisedRun
from softmax_backend.dense16 import torch as exact
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.spec_block_sparse import QuantisedSpec
from softmax_backend.variants.sage import Quantised, dequantised


def bind(row: KernelPath, spec: QuantisedSpec, target: Target) -> QuantisedRun:
    return run


def run(x: Quantised, plan: BlockPlan, scale: float, out: Tensor, lse: Tensor) -> None:
    exact.run(BlockSparseInputs(*dequantised(x), plan, scale, out, lse))
