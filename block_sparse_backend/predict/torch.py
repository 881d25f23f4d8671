"""Prediction in torch, with a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.autocast import without_autocast
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.plan.block_plan import (
    FULL,
    PARTIAL,
    BlockPlan,
    compact,
    uniform_sequences,
    work_list,
)
from block_sparse_backend.plan.choice import Choice, PerHead
from block_sparse_backend.predict import Pooled, plan_of
from block_sparse_backend.spec import PredictSpec


def bind(row: Row, spec: PredictSpec, target: Target) -> PredictInTorch:
    return PredictInTorch(spec)


class PredictInTorch:
    """Products of mean tokens in fp32; always with likenesses."""

    def __init__(self, spec: PredictSpec) -> None:
        self._spec = spec

    def pool(self, q: Tensor, k: Tensor) -> Pooled:
        return pool(q, k, (self._spec.block_m, self._spec.block_n))

    @without_autocast
    def select(self, x: Pooled, choice: Choice, scale: float) -> BlockPlan:
        spec = self._spec
        b, h, tiles, _ = x.q_sums.shape
        blocks, device = x.k_sums.shape[2], x.q_sums.device
        assert x.q_likeness is not None and x.k_likeness is not None

        def mean(sums: Tensor, length: int, block: int) -> Tensor:
            count = (length - torch.arange(sums.shape[2], device=device) * block).clamp(max=block)
            return sums / count[:, None]

        q_mean = mean(x.q_sums, x.lengths[0], spec.block_m)
        k_mean = mean(x.k_sums, x.lengths[1], spec.block_n).repeat_interleave(spec.group, 1)
        of_heads = choice.of_heads(h, device)
        min_likeness, goal = choice.min_likeness, choice.goal
        if of_heads is not None:
            min_likeness, goal = of_heads[0, :, None], of_heads[1, :, None, None]
        kinds = _kinds(
            q_mean @ k_mean.mT * scale,
            x.q_likeness > min_likeness,
            x.k_likeness.repeat_interleave(spec.group, 1) > min_likeness,
            x.lengths,
            (spec.block_m, spec.block_n),
            goal,
            is_cdf=spec.kind.is_cdf,
            is_causal=spec.kind.is_causal,
            keep_first=spec.kind.keep_first,
        )
        rows, cols = compact(kinds.view(-1, blocks))
        row_of = torch.arange(b * h * tiles, device=device).view(b, h, tiles)
        sequences = uniform_sequences(b, *x.lengths, device)
        return plan_of(x, spec, rows, cols, work_list(rows, row_of), sequences)


def pool(q: Tensor, k: Tensor, blocks: tuple[int, int]) -> Pooled:
    """The sums over blocks, and likenesses."""

    def make(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
        b, h, length, d = x.shape
        padded = torch.nn.functional.pad(x, (0, 0, 0, -length % block)).view(b, h, -1, block, d)
        count = (length - torch.arange(padded.shape[2], device=x.device) * block).clamp(max=block)
        unit = padded / padded.norm(dim=-1, keepdim=True).clamp(min=1e-10)
        return padded.sum(3), (unit.sum(3) / count[:, None]).square().sum(-1)

    k = k.float() - k.float().mean(2, keepdim=True)
    q_sums, q_likeness = make(q.float(), blocks[0])
    k_sums, k_likeness = make(k, blocks[1])
    return Pooled(q_sums, k_sums, q_likeness, k_likeness, (q.shape[2], k.shape[2]))


def _kinds(
    logits: Tensor,
    q_trusted: Tensor,
    k_trusted: Tensor,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    goal: PerHead,
    *,
    is_cdf: bool,
    is_causal: bool,
    keep_first: bool,
) -> Tensor:
    """The kind of each block, int8 [B, H, tiles, blocks].

    Args:
        logits: pooled, [B, H, tiles, blocks].
        q_trusted, k_trusted: bool [B, H, tiles] and [B, H, blocks].
        lengths, sizes: of queries and keys, and of their blocks.
        goal: ``Choice.goal``, or the same [H, 1, 1].
    """
    (m, n), (block_m, block_n) = lengths, sizes
    device = logits.device
    col = torch.arange(logits.shape[3], device=device)[None]
    first = torch.arange(logits.shape[2], device=device)[:, None] * block_m + n - m
    exists = torch.ones(logits.shape[2:], dtype=torch.bool, device=device)
    cut = torch.zeros_like(exists)
    if is_causal:
        exists = col * block_n < first + block_m
        cut = exists & ((col + 1) * block_n - 1 > first)
    trusted = exists & k_trusted[:, :, None, :]
    p = torch.softmax(logits.masked_fill(~trusted, -torch.inf), -1).nan_to_num(0.0)
    ordered, place = p.sort(-1, descending=True)
    if is_cdf:
        held = ordered.cumsum(-1) - ordered < goal
    else:
        count = (goal * exists.sum(-1, keepdim=True)).clamp(min=1.0)
        held = torch.arange(p.shape[3], device=device) < count.ceil()
    keep = torch.zeros_like(trusted).scatter(-1, place, held & (ordered > 0))
    keep = keep | ~trusted | ~q_trusted[..., None] | cut
    if keep_first:
        keep = keep | (col == 0)
    whole = ((col + 1) * block_n <= n) & ~cut
    kinds = torch.where(whole, FULL, PARTIAL).to(torch.int8)
    return kinds * (keep & exists)
