"""Attention over blocks in torch, of what the 8-bit kernel multiplies."""

from __future__ import annotations

from torch import Tensor

from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense16 import torch as exact
from block_sparse_backend.plan import intervals, predicted
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.spec import QuantisedSpec
from block_sparse_backend.variants import masks
from block_sparse_backend.variants.pooled import pool_in_torch
from block_sparse_backend.variants.sage import Quantised, dequantised, quantise_in_torch


def bind(row: KernelPath, spec: QuantisedSpec, target: Target) -> QuantisedInTorch:
    return QuantisedInTorch(spec)


class QuantisedInTorch:
    """Products of the quantised inputs in fp32."""

    def __init__(self, spec: QuantisedSpec) -> None:
        self._spec = spec

    def quantise(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Quantised:
        return quantise_in_torch(q, k, v, self._spec.mode, scale, self._spec.block_n)

    def predict(
        self, q: Tensor, k: Tensor, v: Tensor, choice: Choice, scale: float
    ) -> tuple[Quantised, BlockPlan]:
        pooled = pool_in_torch(q, k, (self._spec.block_m, self._spec.block_n))
        plan = predicted.select_in_torch(pooled, choice, scale)
        return self.quantise(q, k, v, scale), plan

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, out: Tensor
    ) -> None:
        """One sequence after another."""
        make = intervals.causal if plan.mask is masks.causal else intervals.dense
        for _, first, m, first_key, n, _ in plan.sequences.tolist():
            if not m or not n:
                continue
            at, keys = slice(first, first + m), slice(first_key, first_key + n)
            blocks = {"block_m": plan.block_m, "block_n": plan.block_n}
            one = make(m, n, q.shape[1], **blocks, device=q.device)
            x = self.quantise(q[:, :, at], k[:, :, keys], v[:, :, keys], scale)
            self.attend(x, one, scale, out[:, :, at], None)

    def attend(
        self, x: Quantised, plan: BlockPlan, scale: float, out: Tensor, lse: Tensor | None
    ) -> None:
        if lse is None:
            lse = x.q_scale.new_empty(x.q.shape[:3])
        exact.run(BlockSparseInputs(*dequantised(x), plan, scale, out, lse))
