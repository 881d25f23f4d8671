"""Sparse MLA in torch, one query token after another: the path of a CPU."""

from __future__ import annotations

import math

import torch

from backend_core.autocast import without_autocast
from backend_core.tables.schema import Row
from backend_core.target import Target
from mla_backend.contract.sparse_mla import NamedRows, SparseMlaInputs
from mla_backend.scratch import SplitScratch
from mla_backend.sparse import WholeTokens
from mla_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec


def bind(row: Row, spec: SparseMlaSpec, target: Target) -> SparseInTorch:
    return SparseInTorch()


class SparseInTorch(WholeTokens):
    """Float32 arithmetic over each token's rows."""

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        _run(x)


@without_autocast
def _run(x: SparseMlaInputs) -> None:
    lists = [given for given in (x.rows, x.extra) if given is not None]
    for i in range(x.q.shape[0]):
        for t in range(x.q.shape[1]):
            rows = torch.cat([_rows(given, i, t) for given in lists])
            if not rows.shape[0]:
                x.out[i, t], x.lse[i, t] = 0, math.inf
                continue
            s = (x.q[i, t].float() @ rows.T) * x.scale
            lse = torch.logsumexp(s, -1)
            p = torch.softmax(s, -1)  # exp(s - lse) would have the rounding of a large lse
            if x.sinks is not None:
                p = p * torch.sigmoid(lse - x.sinks)[:, None]
            x.out[i, t] = (p @ rows).to(x.out.dtype)
            x.lse[i, t] = lse


def _rows(given: NamedRows, request: int, token: int) -> torch.Tensor:
    """The rows that a token's list names, ``[rows, 512]`` float32."""
    count = given.topk if given.lengths is None else int(given.lengths[request])
    index = given.indices[request, token, : max(count, 0)].long()
    index = index[(index >= 0) & (index < given.num_rows)]
    if not len(index):
        return torch.empty(0, HEAD_DIM, dtype=torch.float32, device=index.device)
    if given.cache.dim() == 2:
        return given.cache[index].float()
    size, stride = given.cache.shape[1], given.cache.stride(0)
    flat = given.cache.view(torch.uint8)
    page, row = index // size, index % size
    whole = (given.cache.shape[0] - 1) * stride + size * 584
    memory = flat.as_strided((whole,), (1,))
    data_at = page * stride + row * 576
    scales_at = page * stride + size * 576 + row * 8
    data = memory[data_at[:, None] + torch.arange(576, device=index.device)]
    codes = memory[scales_at[:, None] + torch.arange(7, device=index.device)]
    scales = codes.contiguous().view(torch.float8_e8m0fnu).float().repeat_interleave(64, 1)
    nope = data[:, :448].contiguous().view(torch.float8_e4m3fn).float()
    rope = data[:, 448:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope * scales, rope], 1)
