"""Inputs and comparisons shared by the tests of block-sparse attention."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.operator import forced
from backend_core.tables.schema import Row
from backend_core.target import detect_target
from block_sparse_backend.dense8 import Attend
from block_sparse_backend.launch_params import TABLES, TritonParams
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.quantise import Quantise, Quantised, QuantisePath
from block_sparse_backend.selection import paths_on
from block_sparse_backend.spec import QuantisedSpec, QuantiseSpec, SageMode

BLOCKS = {"block_m": 32, "block_n": 32}
OUT_ERROR, LSE_ERROR = 4e-3, 2e-3  # bf16 and fp16 weights round to 2^-9 and 2^-12


def inputs(
    shape_q: tuple[int, int, int],
    shape_k: tuple[int, int, int],
    *,
    seed: int,
    device: torch.device,
    dv: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, M, D], k [B, Hkv, N, D] and v [B, Hkv, N, DV] as views of [B, L, H, D] storage.

    Args:
        shape_q, shape_k: (heads, tokens, D).
    """
    generator = torch.Generator().manual_seed(seed)

    def make(heads: int, tokens: int, d: int) -> Tensor:
        x = torch.randn(batch, tokens, heads, d, generator=generator)
        return x.to(device, dtype).transpose(1, 2)

    heads, tokens, d = shape_k
    return make(*shape_q), make(heads, tokens, d), make(heads, tokens, dv or d)


def causal_seen(q_len: int, kv_len: int) -> Tensor:
    """bool [M, N], aligned to the bottom right."""
    return torch.arange(q_len)[:, None] + kv_len - q_len >= torch.arange(kv_len)[None]


def quantiser(
    q: Tensor, k: Tensor, v: Tensor, mode: SageMode, block_n: int, path: str = "triton"
) -> Quantise:
    """The function that quantises such inputs for 8-bit attention."""
    spec = QuantiseSpec(mode, block_n=block_n)
    selection = paths_on(q.device, path, "quantise").select("quantise", spec, "q", q)
    chosen: QuantisePath = selection.run(1)
    return chosen(q, k, v, None)


def quantised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mode: SageMode,
    scale: float,
    block_n: int,
    path: str = "triton",
) -> Quantised:
    """Inputs as 8-bit attention takes them."""
    return quantiser(q, k, v, mode, block_n, path)(q, k, v, scale, None)[0]


def attention_of(x: Quantised, plan: BlockPlan, params: TritonParams) -> Attend:
    """The 8-bit kernel alone, with other parameters than the table's."""
    heads, group = x.q.shape[1], x.q.shape[1] // x.k.shape[1]
    tile = (plan.block_m, plan.block_n, plan.mask)
    spec = QuantisedSpec(x.mode, heads, group, x.q.shape[3], *tile)
    row = Row("triton", "block_sparse_int8", None, frozenset(), params, False, "as given")
    attend: Attend = forced(TABLES, detect_target(x.q.device), spec, row).run(1)
    return attend


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
        begin, full_end, end, _ = rows[row].tolist()
        m = torch.arange(tile * bm, min((tile + 1) * bm, q_len))
        for j in range(begin, end):
            col = int(cols[j])
            n = torch.arange(col * bn, min((col + 1) * bn, kv_len))
            attended = torch.ones(len(m), len(n), dtype=torch.bool)
            if j >= full_end:
                at = (m[:, None] + position, n[None, :], col)
                attended = plan.mask.torch(*at, aux).expand_as(attended)
            seen[head, m[:, None], n[None, :]] |= attended
    return seen
