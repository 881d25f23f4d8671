"""Block-sparse attention in torch: any device, any dtype, one tile of queries after another."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.autocast import without_autocast
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense16 import BlockSparsePath
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.spec import BlockSparseSpec


def bind(row: Row, spec: BlockSparseSpec, target: Target) -> BlockSparsePath:
    return lambda x: run


@without_autocast
def run(x: BlockSparseInputs) -> None:
    """Products and softmax are in fp32, in float64 for float64 inputs."""
    q, k, v, plan, out, lse = x.q, x.k, x.v, x.plan, x.out, x.lse
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    rows, cols, table = plan.rows.tolist(), plan.cols.cpu(), plan.sequences.tolist()
    for batch, q_begin, q_len, *_ in table:  # rows of no sequence stay as they are
        out[batch, :, q_begin : q_begin + q_len] = 0.0
        lse[batch, :, q_begin : q_begin + q_len] = -torch.inf
    for i_s, head, tile, row in plan.work.tolist():
        if i_s < 0:
            continue
        batch, q_begin, q_len, k_begin, kv_len, position = table[i_s]
        first, last = tile * plan.block_m, min((tile + 1) * plan.block_m, q_len)
        o_m = torch.arange(first, last, device=q.device)
        k_pos, seen = _keys_of(plan, rows[row], cols, o_m + position, kv_len)
        kv_head = head // group
        b_k, b_v = (x[batch, kv_head, k_begin + k_pos].to(dtype) for x in (k, v))
        s = x.scale * (q[batch, head, q_begin + o_m].to(dtype) @ b_k.T)
        s = torch.where(seen, s, -torch.inf)
        b_lse = torch.logsumexp(s, -1)
        # exp(s - b_lse) would have the rounding of b_lse, which grows with the logits
        p = torch.softmax(s, -1).masked_fill((b_lse == -torch.inf)[:, None], 0.0)
        b_o = p @ b_v
        out[batch, head, q_begin + o_m] = b_o.to(out.dtype)
        lse[batch, head, q_begin + o_m] = b_lse.to(lse.dtype)


def _keys_of(
    plan: BlockPlan, bounds: list[int], cols: Tensor, q_pos: Tensor, kv_len: int
) -> tuple[Tensor, Tensor]:
    """The keys of one row of the plan, int64 [N], and which of them each query sees [M, N]."""
    begin, full_end, end, _ = bounds
    aux = plan.cols if plan.mask_aux is None else plan.mask_aux
    keys, attended = [], []
    for j in range(begin, end):
        col = int(cols[j])
        ends = col * plan.block_n, min((col + 1) * plan.block_n, kv_len)
        n = torch.arange(*ends, device=q_pos.device)
        seen = torch.ones(len(q_pos), len(n), dtype=torch.bool, device=q_pos.device)
        if j >= full_end:
            seen = plan.mask.torch(q_pos[:, None], n[None, :], col, aux).expand_as(seen)
        keys.append(n)
        attended.append(seen)
    if not keys:
        nothing = torch.zeros(0, dtype=torch.long, device=q_pos.device)
        return nothing, torch.zeros(len(q_pos), 0, dtype=torch.bool, device=q_pos.device)
    return torch.cat(keys), torch.cat(attended, 1)
