"""Plans predicted from the inputs, as SpargeAttn does, and the attention mass that a plan keeps.

The threshold of a prediction is on pooled blocks and promises nothing about the attention itself:
a pooled sum of 0.95 was seen to keep 0.68 to 0.88 of it. ``recall`` measures what a plan keeps.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from backend_core.autocast import without_autocast
from backend_core.contracts import expect_device, expect_kernel_device
from backend_core.launch.streams import is_elsewhere, run_there
from block_sparse_backend.kernels import plans
from block_sparse_backend.kernels import predict as kernels
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import (
    FULL,
    PARTIAL,
    BlockPlan,
    compact,
    from_kinds,
    uniform_sequences,
    work_list,
)
from block_sparse_backend.plan.choice import Choice, PerHead
from block_sparse_backend.prepared import has_kernels, prepared
from block_sparse_backend.spec import LOG2_E
from block_sparse_backend.variants import masks
from block_sparse_backend.variants.pooled import Pooled, pool, pool_in_torch

SCORE_ROWS, SCORE_COLS, SCORE_WARPS = 128, 64, 4
"""Tiles and blocks that a program of ``score_kernel`` scores, and its warps."""
SCORE_STEP = 32
"""Channels that a program of ``score_kernel`` multiplies at a time."""
ORDER_ROWS = 64
"""Rows that a program of ``order_rows_kernel`` places, and compares with its own at a time."""


def predict(
    q: Tensor,
    k: Tensor,
    *,
    cdf: PerHead | None = None,
    topk: PerHead | None = None,
    min_likeness: PerHead = -0.1,
    is_causal: bool = False,
    keep_first: bool = False,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 128,
    path: str | None = None,
) -> BlockPlan:
    """The blocks that most of the attention is predicted to lie in, for each head.

    What all keys share is subtracted from them, by which no softmax over keys changes. In Triton a
    tile or a block has no score, and is kept, where a channel of what is left of its mean key, or
    of its mean query times ``scale`` log2(e), is 65,504 or more.
    No value is read on the host, so the prediction can be captured in a CUDA graph.

    Args:
        q, k: [B, H, M, D] and [B, Hkv, N, D].
        cdf, topk, min_likeness, is_causal, keep_first: as in ``Choice``.
        scale: default 1 / sqrt(D).
        path: ``"torch"`` or ``"triton"``; by default Triton wherever it runs.

    Raises:
        ValueError: not exactly one of ``cdf`` and ``topk`` is given, or it is not in (0, 1], or has
            another number of heads; or the plan would have 2^31 blocks or more, or the path is
            another one, or q and k are on different devices.
    """
    if is_elsewhere(q):
        return run_there(q, predict, locals())
    expect_device("k", k, q.device)
    choice = Choice(cdf, topk, min_likeness, is_causal, keep_first)
    choice.check_heads(q.shape[1])
    check_size(q, k, block_m, block_n)
    d = q.shape[3]
    scale = d**-0.5 if scale is None else scale
    blocks = block_m, block_n
    if not runs_kernels(q, path):
        return select_in_torch(pool_in_torch(q, k, blocks), choice, scale)
    if d < 16 or d & (d - 1):
        pad = (0, max(16, triton.next_power_of_2(d)) - d)  # zeros add nothing to a product
        q, k = (torch.nn.functional.pad(x, pad) for x in (q, k))
    return select_blocks(pool(q, k, blocks, choice.has_likeness), choice, scale)


def runs_kernels(x: Tensor, path: str | None) -> bool:
    """Whether a prediction runs in Triton; by default wherever that runs.

    Raises:
        ValueError: the caller names another one than ``"torch"`` and ``"triton"``, or Triton's for
            a tensor on a CPU.
    """
    if path not in (None, "torch", "triton"):
        raise ValueError(f'path must be "torch" or "triton", got {path!r}')
    if path == "triton":
        expect_kernel_device("q", x)
    return has_kernels(x) if path is None else path == "triton"


def check_size(q: Tensor, k: Tensor, block_m: int, block_n: int) -> None:
    """Columns of a predicted plan are numbered in int32.

    Raises:
        ValueError: there would be 2^31 or more, or there is no token.
    """
    for name, x in (("q", q), ("k", k)):
        if not x.numel():
            raise ValueError(f"{name} must have at least one token, got shape {list(x.shape)}")
    b, h, m, _ = q.shape
    total = b * h * -(-m // block_m) * -(-k.shape[2] // block_n)
    if total >= 1 << 31:
        raise ValueError(
            f"a predicted plan must have fewer than 2^31 blocks of {block_m} queries by {block_n} "
            f"keys over all heads, got {total}"
        )


def _plan_of(
    x: Pooled, choice: Choice, rows: Tensor, cols: Tensor, work: Tensor, sequences: Tensor
) -> BlockPlan:
    return BlockPlan(
        rows,
        cols,
        work,
        sequences,
        x.q_sums.shape[1],
        x.block_m,
        x.block_n,
        has_partial=choice.is_causal or x.lengths[1] % x.block_n != 0,
        mask=masks.causal if choice.is_causal else masks.everything,
    )


def scores(x: Pooled, is_causal: bool, scale_log2: float) -> Tensor:
    """Logits of mean queries and mean keys, base 2: float32 [B, H, tiles, at least blocks], which
    hold what a tile sees, but for a number for each tile that its keys share."""
    b, h, tiles, d = x.q_sums.shape
    hk, blocks = x.k_sums.shape[1:3]
    m, n = x.lengths
    pitch = -(-blocks // 32) * 32  # rows of scores begin at 128 bytes
    found = torch.empty(b, h, tiles, pitch, dtype=torch.float32, device=x.q_sums.device)
    constexprs = {
        "HEADS": h,
        "GROUP": h // hk,
        "D": d,
        "BLOCK_M": x.block_m,
        "BLOCK_N": x.block_n,
        "ROWS": SCORE_ROWS,
        "COLS": SCORE_COLS,
        "STEP": min(SCORE_STEP, d),
        "IS_CAUSAL": is_causal,
        "IS_CENTRED": x.is_centred,
    }
    prepared(kernels.score_kernel, SCORE_WARPS, **constexprs).launch(
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


def select_blocks(x: Pooled, choice: Choice, scale: float) -> BlockPlan:
    """The plan for pooled queries and keys by kernels, without a read of the device; see
    ``predict``."""
    b, h, tiles, _ = x.q_sums.shape
    hk, blocks = x.k_sums.shape[1:3]
    m, n = x.lengths
    found = scores(x, choice.is_causal, scale * LOG2_E)
    of_heads = choice.of_heads(h, found.device)
    min_likeness, goal = (0.0, 0.0) if of_heads is not None else (choice.min_likeness, choice.goal)
    new = functools.partial(torch.empty, dtype=torch.int32, device=x.q_sums.device)
    rows, cols = new(b * h * tiles, 4), new(b * h * tiles * blocks)
    width = max(64, triton.next_power_of_2(blocks))
    has_likeness = choice.has_likeness and x.k_likeness is not None
    constexprs = {
        "HEADS": h,
        "GROUP": h // hk,
        "BLOCK_M": x.block_m,
        "BLOCK_N": x.block_n,
        "WIDTH": width,
        "IS_CAUSAL": choice.is_causal,
        "IS_CDF": choice.cdf is not None,
        "HAS_SINK": choice.keep_first,
        "HAS_LIKENESS": has_likeness,
        "PER_HEAD": of_heads is not None,
    }
    warps = max(1, width // 1024)  # within one warp a reduction has no barrier
    prepared(kernels.select_blocks_kernel, warps, **constexprs).launch(
        (tiles * b * h, 1, 1),
        scores_ptr=found,
        q_likeness_ptr=x.q_likeness if has_likeness else found,
        k_likeness_ptr=x.k_likeness if has_likeness else found,
        of_heads_ptr=found if of_heads is None else of_heads,
        rows_ptr=rows,
        cols_ptr=cols,
        tiles=tiles,
        blocks=blocks,
        pitch=found.shape[3],
        kv_len=n,
        q_position=n - m,
        min_likeness=min_likeness,
        amount=goal,
    )
    return _plan_of(x, choice, rows, cols, *_ordered(rows, (b, h, tiles), (m, n)))


def _ordered(
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


def from_map(
    kept: Tensor, lengths: tuple[int, int], sizes: tuple[int, int], keep_first: bool
) -> BlockPlan:
    """The plan of a map of blocks: bool or int [B, H, tiles, blocks], kept where it is not 0.

    Args:
        lengths: queries and keys.
        sizes: queries in a tile and keys in a block.
        keep_first: keep the first block in any case.
    """
    b, h, tiles, blocks = kept.shape
    (m, n), (block_m, block_n) = lengths, sizes
    if has_kernels(kept):
        kept = kept.contiguous()
        new = functools.partial(torch.empty, dtype=torch.int32, device=kept.device)
        rows, cols = new(b * h * tiles, 4), new(b * h * tiles * blocks)
        width = max(64, triton.next_power_of_2(blocks))
        flags = {"BLOCK_N": block_n, "WIDTH": width, "HAS_SINK": keep_first}
        prepared(plans.map_rows_kernel, max(1, width // 1024), **flags).launch(
            (b * h * tiles, 1, 1),
            map_ptr=kept.view(torch.uint8) if kept.dtype == torch.bool else kept,
            rows_ptr=rows,
            cols_ptr=cols,
            blocks=blocks,
            kv_len=n,
        )
        work, sequences = _ordered(rows, (b, h, tiles), lengths)
        has_partial = n % block_n != 0
        return BlockPlan(rows, cols, work, sequences, h, block_m, block_n, has_partial)
    kinds = (kept != 0).to(torch.int8) * FULL
    if keep_first:
        kinds[..., 0] = FULL
    if n % block_n:
        kinds[..., -1] *= PARTIAL
    return from_kinds(kinds, h, uniform_sequences(b, m, n, kept.device), block_m, block_n)


@without_autocast
def select_in_torch(x: Pooled, choice: Choice, scale: float) -> BlockPlan:
    """`select_blocks` in torch."""
    b, h, tiles, _ = x.q_sums.shape
    hk, blocks = x.k_sums.shape[1:3]
    group = h // hk
    device = x.q_sums.device
    assert x.q_likeness is not None and x.k_likeness is not None and x.is_centred

    def mean(sums: Tensor, length: int, block: int) -> Tensor:
        count = (length - torch.arange(sums.shape[2], device=device) * block).clamp(max=block)
        return sums / count[:, None]

    q_mean = mean(x.q_sums, x.lengths[0], x.block_m)
    k_mean = mean(x.k_sums, x.lengths[1], x.block_n).repeat_interleave(group, 1)
    of_heads = choice.of_heads(h, device)
    min_likeness, goal = choice.min_likeness, choice.goal
    if of_heads is not None:
        min_likeness, goal = of_heads[0, :, None], of_heads[1, :, None, None]
    kinds = select_kinds(
        q_mean @ k_mean.mT * scale,
        x.q_likeness > min_likeness,
        x.k_likeness.repeat_interleave(group, 1) > min_likeness,
        x.lengths,
        (x.block_m, x.block_n),
        goal,
        is_cdf=choice.cdf is not None,
        is_causal=choice.is_causal,
        keep_first=choice.keep_first,
    )
    rows, cols = compact(kinds.view(-1, blocks))
    row_of = torch.arange(b * h * tiles, device=device).view(b, h, tiles)
    sequences = uniform_sequences(b, *x.lengths, device)
    return _plan_of(x, choice, rows, cols, work_list(rows, row_of), sequences)


def select_kinds(
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
    """The selection in torch, with a sort: int8 kinds [B, H, tiles, blocks].

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


def recall(plan: BlockPlan, q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """The share of the attention that a plan keeps, mean over queries: float32 [B, H].

    It is exp(LSE over the plan - LSE over all keys that the plan's mask lets a query see), from two
    runs of the operator. The cost is that of dense attention.

    Args:
        plan: a plan of dense or causal attention that leaves blocks out.
        q, k: [B, H, M, D] and [B, Hkv, N, D].
    """
    from block_sparse_backend.block_sparse import block_sparse_attention

    b, h, m, _ = q.shape
    make = intervals.causal if plan.mask is masks.causal else intervals.dense
    whole = make(
        m, k.shape[2], h, batch=b, block_m=plan.block_m, block_n=plan.block_n, device=q.device
    )
    kept = block_sparse_attention(q, k, k, plan, scale=scale)[1]
    total = block_sparse_attention(q, k, k, whole, scale=scale)[1]
    sees = total != -torch.inf
    share = torch.where(sees, torch.exp(kept - torch.where(sees, total, 0.0)), 0.0)
    return share.sum(2) / sees.sum(2).clamp(min=1)
