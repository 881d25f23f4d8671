"""Prediction by kernels, without a read of the device."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.kernels import predict as kernels
from block_sparse_backend.launches import prepared
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.predict import Pooled, plan_of
from block_sparse_backend.quantise.triton import column_mean
from block_sparse_backend.spec import LOG2_E, PredictSpec

SCORE_ROWS, SCORE_COLS, SCORE_WARPS = 128, 64, 4
"""Tiles and blocks that a program of ``score_kernel`` scores, and its warps."""
SCORE_STEP = 32
"""Channels that a program of ``score_kernel`` multiplies at a time."""
ORDER_ROWS = 64
"""Rows that a program of ``order_rows_kernel`` places, and compares with its own at a time."""
POOL_STEP = 16
"""Tokens that a program of ``pool_kernel``, of one warp, holds."""


def bind(row: Row, spec: PredictSpec, target: Target) -> PredictInTriton:
    if spec.block_m % POOL_STEP or spec.block_n % POOL_STEP:
        raise ValueError(
            f"block_m and block_n must be multiples of {POOL_STEP} in Triton, got {spec.block_m}"
            f" and {spec.block_n}"
        )
    return PredictInTriton(spec)


def empty_pool(x: Tensor, block: int, has_likeness: bool) -> tuple[Tensor, Tensor | None]:
    """Room for the sums over blocks of [B, H, L, D], and for likenesses."""
    b, h, length, d = x.shape
    shape = (b, h, -(-length // block))
    new = torch.empty(*shape, d, dtype=torch.float32, device=x.device)
    return new, new.new_empty(shape) if has_likeness else None


class PredictInTriton:
    """Scores of mean tokens, and a threshold that is bisected in registers."""

    def __init__(self, spec: PredictSpec) -> None:
        self._spec = spec
        self._scores, self._choosing = functools.cache(self._score), functools.cache(self._chooser)

    def _score(self, d: int) -> KernelLaunch:
        spec = self._spec
        return prepared(
            kernels.score_kernel,
            SCORE_WARPS,
            HEADS=spec.heads,
            GROUP=spec.group,
            D=d,
            BLOCK_M=spec.block_m,
            BLOCK_N=spec.block_n,
            ROWS=SCORE_ROWS,
            COLS=SCORE_COLS,
            STEP=min(SCORE_STEP, d),
            IS_CAUSAL=spec.kind.is_causal,
            IS_CENTRED=spec.is_centred,
        )

    def _chooser(self, width: int) -> KernelLaunch:
        spec, kind = self._spec, self._spec.kind
        return prepared(
            kernels.select_blocks_kernel,
            max(1, width // 1024),  # within one warp a reduction has no barrier
            HEADS=spec.heads,
            GROUP=spec.group,
            BLOCK_M=spec.block_m,
            BLOCK_N=spec.block_n,
            WIDTH=width,
            IS_CAUSAL=kind.is_causal,
            IS_CDF=kind.is_cdf,
            HAS_SINK=kind.keep_first,
            HAS_LIKENESS=kind.has_likeness,
            PER_HEAD=kind.per_head,
        )

    def pool(self, q: Tensor, k: Tensor) -> Pooled:
        """Without likenesses the kernels read the keys once, and leave it to the scores to take
        out what all keys share."""
        spec, d = self._spec, q.shape[3]
        q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
        has_likeness = spec.kind.has_likeness
        if d < 16 or d & (d - 1):
            pad = (0, max(16, triton.next_power_of_2(d)) - d)  # zeros add nothing to a product
            q, k = (torch.nn.functional.pad(x, pad) for x in (q, k))
        q_sums, q_likeness = empty_pool(q, spec.block_m, has_likeness)
        k_sums, k_likeness = empty_pool(k, spec.block_n, has_likeness)
        _pool(q, None, q_sums, q_likeness, spec.block_m)
        _pool(k, column_mean(k) if has_likeness else None, k_sums, k_likeness, spec.block_n)
        return Pooled(q_sums, k_sums, q_likeness, k_likeness, (q.shape[2], k.shape[2]))

    def scores(self, x: Pooled, scale_log2: float) -> Tensor:
        """Logits of mean queries and mean keys, base 2: float32 [B, H, tiles, at least blocks],
        which hold what a tile sees, but for a number for each tile that its keys share."""
        b, h, tiles, d = x.q_sums.shape
        blocks, (m, n) = x.k_sums.shape[2], x.lengths
        pitch = -(-blocks // 32) * 32  # rows of scores begin at 128 bytes
        found = torch.empty(b, h, tiles, pitch, dtype=torch.float32, device=x.q_sums.device)
        self._scores(d).launch(
            (-(-tiles // SCORE_ROWS) * -(-blocks // SCORE_COLS) * b * h, 1, 1),
            q_sums_ptr=x.q_sums,
            k_sums_ptr=x.k_sums,
            scores_ptr=found,
            tiles=tiles,
            blocks=blocks,
            pitch=pitch,
            q_len=m,
            kv_len=n,
            q_position=n - m,
            scale_log2=scale_log2,
        )
        return found

    def select(self, x: Pooled, choice: Choice, scale: float) -> BlockPlan:
        b, h, tiles, _ = x.q_sums.shape
        blocks, (m, n), kind = x.k_sums.shape[2], x.lengths, self._spec.kind
        found = self.scores(x, scale * LOG2_E)
        of_heads = choice.of_heads(h, found.device) if kind.per_head else None
        numbers = (0.0, 0.0) if kind.per_head else (choice.min_likeness, choice.goal)
        new = functools.partial(torch.empty, dtype=torch.int32, device=found.device)
        rows, cols = new(b * h * tiles, 4), new(b * h * tiles * blocks)
        self._choosing(max(64, triton.next_power_of_2(blocks))).launch(
            (tiles * b * h, 1, 1),
            scores_ptr=found,
            q_likeness_ptr=x.q_likeness if kind.has_likeness else found,
            k_likeness_ptr=x.k_likeness if kind.has_likeness else found,
            of_heads_ptr=found if of_heads is None else of_heads,
            rows_ptr=rows,
            cols_ptr=cols,
            tiles=tiles,
            blocks=blocks,
            pitch=found.shape[3],
            kv_len=n,
            q_position=n - m,
            min_likeness=numbers[0],
            amount=numbers[1],
        )
        work, sequences = ordered(rows, (b, h, tiles), (m, n))
        return plan_of(x, self._spec, rows, cols, work, sequences)


def _pool(
    x: Tensor, mean: Tensor | None, sums: Tensor, likeness: Tensor | None, block: int
) -> None:
    b, h, _, d = x.shape
    flags = {"HAS_MEAN": mean is not None, "HAS_LIKENESS": likeness is not None}
    sizes = {"HEADS": h, "D": d, "BLOCK": block, "STEP": POOL_STEP}
    prepared(kernels.pool_kernel, 1, "x", **sizes, **flags).launch(
        (sums.shape[2] * b * h, 1, 1),
        x_ptr=x,
        mean_ptr=sums if mean is None else mean,
        sums_ptr=sums,
        likeness_ptr=sums if likeness is None else likeness,
        length=x.shape[2],
        blocks=sums.shape[2],
    )


def ordered(
    rows: Tensor, shape: tuple[int, int, int], lengths: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """``work`` and ``sequences`` of a plan with a row for each tile of [B, H, tiles]."""
    b, h, tiles = shape
    work, sequences = torch.empty_like(rows), rows.new_empty(b, 6)
    prepared(kernels.order_rows_kernel, 4, HEADS=h, BLOCK=ORDER_ROWS).launch(
        (-(-tiles // ORDER_ROWS) * b * h, 1, 1),
        rows_ptr=rows,
        work_ptr=work,
        sequences_ptr=sequences,
        tiles=tiles,
        q_len=lengths[0],
        kv_len=lengths[1],
    )
    return work, sequences
