"""Attention over a plan's blocks in float64, written plainly, and the plan's own token mask.

LSE is natural; a query that sees nothing has output 0 and LSE -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_backend.plan.block_plan import BlockPlan


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the elements that ``seen`` has.

    Args:
        q, k, v: [..., H, M, D], [..., Hkv, N, D] and [..., Hkv, N, DV].
        seen: bool, broadcastable to [..., H, M, N].

    Returns:
        Output [..., H, M, DV] and LSE [..., H, M], float64.
    """
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    s = scale * (q @ k.transpose(-1, -2))
    s = torch.where(seen, s, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return p @ v, lse


def elements_seen(plan: BlockPlan, sequence: int = 0) -> Tensor:
    """bool [H, M, N]: what the plan lets each query of a sequence attend."""
    _, _, q_len, _, kv_len, position = plan.sequences[sequence].tolist()
    bm, bn = plan.block_m, plan.block_n
    seen = torch.zeros(plan.num_heads, q_len, kv_len, dtype=torch.bool)
    rows, cols = plan.rows.cpu(), plan.cols.cpu()
    aux = plan.cols.cpu() if plan.mask_aux is None else plan.mask_aux.cpu()
    for i_s, head, tile, row in plan.work.tolist():
        if i_s != sequence:
            continue
        begin, full_end, end, slot = rows[row].tolist()
        m = torch.arange(tile * bm, min((tile + 1) * bm, q_len))
        for j in range(begin, end):
            col = int(cols[j])
            n = torch.arange(col * bn, min((col + 1) * bn, kv_len))
            attended = torch.ones(len(m), len(n), dtype=torch.bool)
            if j >= full_end:
                at = (m[:, None] + position, n[None, :], col, slot + j - full_end, head)
                attended = plan.mask.torch(*at, aux).expand_as(attended)
            seen[head, m[:, None], n[None, :]] |= attended
    return seen
