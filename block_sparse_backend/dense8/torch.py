"""Attention over blocks in torch, of what the 8-bit kernel multiplies."""

from __future__ import annotations

from torch import Tensor

from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense8 import Attend
from block_sparse_backend.dense16 import torch as exact
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.quantise import Quantised
from block_sparse_backend.quantise.torch import dequantised
from block_sparse_backend.spec import QuantisedSpec


def bind(row: Row, spec: QuantisedSpec, target: Target) -> Attend:
    return attend


def attend(x: Quantised, plan: BlockPlan, scale: float, out: Tensor, lse: Tensor | None) -> None:
    """Products of the quantised inputs in fp32."""
    if lse is None:
        lse = x.q_scale.new_empty(x.q.shape[:3])
    packed = plan if plan.is_packed else None
    exact.run(BlockSparseInputs(*dequantised(x, packed), plan, scale, out, lse))
