"""Plans predicted from the inputs, as SpargeAttn does, and the attention mass that a plan keeps.

The threshold of a prediction is on pooled blocks and promises nothing about the attention itself:
a pooled sum of 0.95 was seen to keep 0.68 to 0.88 of it. ``recall`` measures what a plan keeps.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from softmax_backend.kernels import predict as kernels
from softmax_backend.plan import intervals
from softmax_backend.plan.block_plan import (
    FULL,
    PARTIAL,
    BlockPlan,
    compact,
    uniform_sequences,
    work_list,
)
from softmax_backend.variants import masks
from softmax_backend.variants.sage import column_mean
from softmax_backend.variants.variant import LOG2_E


def predict(
    q: Tensor,
    k: Tensor,
    *,
    cdf: float | None = None,
    topk: float | None = None,
    min_likeness: float = -0.1,
    is_causal: bool = False,
    keep_first: bool = False,
    smooth_k: bool = True,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 128,
) -> BlockPlan:
    """The blocks that most of the attention is predicted to lie in, for each head.

    No value is read on the host, so the prediction can be captured in a CUDA graph.

    Args:
        q, k: [B, H, M, D] and [B, Hkv, N, D].
        cdf: keep blocks, largest first, until their pooled softmax sums to this; or
        topk: keep this share of the blocks that a tile may see, at least one.
        min_likeness: a block whose tokens' mean cosine is not above this is kept, whole rows and
            columns of the map.
        is_causal: aligned to the bottom right; blocks that the diagonal cuts are kept.
        keep_first: keep the first block of keys (the attention sink).
        smooth_k: pool the keys without their mean, which no softmax over keys sees.
        scale: default 1 / sqrt(D).

    Raises:
        ValueError: not exactly one of ``cdf`` and ``topk`` is given, or it is not in (0, 1].
    """
    amount = topk if cdf is None else cdf
    if amount is None or (cdf is not None and topk is not None):
        raise ValueError(f"exactly one of cdf and topk must be given, got {cdf} and {topk}")
    if not 0.0 < amount <= 1.0:
        raise ValueError(f"cdf and topk must be above 0 and at most 1, got {amount}")
    b, h, m, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    tiles, blocks = -(-m // block_m), -(-n // block_n)
    if not smooth_k:
        k_mean = torch.zeros(b, hk, d, device=q.device)
    elif _has_kernels(k):
        k_mean = column_mean(k)
    else:
        k_mean = k.mean(2, dtype=torch.float32)
    q_pooled, q_likeness = _pool(q, torch.zeros(b, h, d, device=q.device), block_m)
    k_pooled, k_likeness = _pool(k, k_mean, block_n)
    grouped = q_pooled.view(b * hk, h // hk * tiles, d)
    scores = torch.bmm(grouped, k_pooled.view(b * hk, blocks, d).transpose(1, 2))
    rows = torch.empty(b * h * tiles, 4, dtype=torch.int32, device=q.device)
    cols = torch.zeros(b * h * tiles * blocks, dtype=torch.int32, device=q.device)
    scale_log2 = (d**-0.5 if scale is None else scale) * LOG2_E
    # a sum of 1 is all blocks, whatever their rounding
    goal = 2.0 if cdf == 1.0 else amount
    if _has_kernels(q):
        kernels.select_blocks_kernel[(tiles, b * h)](
            scores_ptr=scores,
            q_likeness_ptr=q_likeness,
            k_likeness_ptr=k_likeness,
            rows_ptr=rows,
            cols_ptr=cols,
            tiles=tiles,
            blocks=blocks,
            kv_len=n,
            q_position=n - m,
            scale_log2=scale_log2,
            min_likeness=min_likeness,
            amount=goal,
            HEADS=h,
            GROUP=h // hk,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            WIDTH=triton.next_power_of_2(blocks),
            IS_CAUSAL=is_causal,
            IS_CDF=cdf is not None,
            HAS_SINK=keep_first,
            num_warps=max(1, blocks // 1024),  # within one warp a reduction has no barrier
        )
    else:
        kinds = select_kinds(
            scores.view(b, h, tiles, blocks) * (scale_log2 / LOG2_E),
            q_likeness > min_likeness,
            (k_likeness > min_likeness).repeat_interleave(h // hk, 1),
            (m, n),
            (block_m, block_n),
            goal,
            is_cdf=cdf is not None,
            is_causal=is_causal,
            keep_first=keep_first,
        )
        rows, cols = compact(kinds.view(-1, blocks))
    row_of = torch.arange(b * h * tiles, device=q.device).view(b, h, tiles)
    return BlockPlan(
        rows,
        cols,
        work_list(rows, row_of),
        uniform_sequences(b, m, n, q.device),
        h,
        block_m,
        block_n,
        has_partial=is_causal or n % block_n != 0,
        mask=masks.causal if is_causal else masks.everything,
    )


def select_kinds(
    logits: Tensor,
    q_trusted: Tensor,
    k_trusted: Tensor,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    goal: float,
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
        count = (goal * exists.sum(-1)).clamp(min=1.0)
        held = torch.arange(p.shape[3], device=device) < count[:, None].ceil()
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
        plan: dense or causal but for the blocks it leaves out.
        q, k: [B, H, M, D] and [B, Hkv, N, D].
    """
    from softmax_backend.block_sparse import block_sparse_attention

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


def _pool(x: Tensor, mean: Tensor, block: int) -> tuple[Tensor, Tensor]:
    b, h, length, d = x.shape
    blocks = -(-length // block)
    if not _has_kernels(x):
        padded = torch.nn.functional.pad(x.float() - mean[:, :, None], (0, 0, 0, -length % block))
        padded = padded.view(b, h, blocks, block, d)
        count = (length - torch.arange(blocks, device=x.device) * block).clamp(max=block)
        unit = padded / padded.norm(dim=-1, keepdim=True).clamp(min=1e-10)
        pooled, centre = (t.sum(3) / count[:, None] for t in (padded, unit))
        return pooled, centre.square().sum(-1)
    pooled = torch.empty(b, h, blocks, d, dtype=torch.float32, device=x.device)
    likeness = torch.empty(b, h, blocks, dtype=torch.float32, device=x.device)
    kernels.pool_kernel[(blocks, b * h)](
        x_ptr=x,
        mean_ptr=mean,
        pooled_ptr=pooled,
        likeness_ptr=likeness,
        length=length,
        stride_b=x.stride(0),
        stride_h=x.stride(1),
        stride_n=x.stride(2),
        HEADS=h,
        D=d,
        BLOCK=block,
        num_warps=8,
    )
    return pooled, likeness


def _has_kernels(x: Tensor) -> bool:
    """Whether Triton runs here: on a GPU, or on a CPU under its interpreter."""
    interpreted = not isinstance(kernels.pool_kernel, triton.runtime.JITFunction)
    return x.device.type != "cpu" or interpreted
