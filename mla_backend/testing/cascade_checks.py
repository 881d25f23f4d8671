"""Calls of ``kda-dsv4 check`` with several levels of keys: paged attention, and their merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_backend import reference
from mla_backend.drop_ins.flashinfer.cascade import MultiLevelCascadeAttentionWrapper

if TYPE_CHECKING:
    from backend_core.target import Target

ALLOWED = 8e-3
"""Relative L2 of the output, which bf16 rounds twice: in each level and after the merge."""
_HEADS, _KV_HEADS, _DIM, _PAGE = 6, 2, 64, 16
_SHARED, _OWN, _LAST, _QUERIES = [3, 0], [[5, 1], [2], [7, 4, 6]], [9, 16, 3], [2, 1, 3]


def two_levels(target: Target, device: torch.device) -> tuple[float, float]:
    """Three requests over two shared pages and pages of their own, causal in the last level."""
    generator = torch.Generator().manual_seed(11)
    cache = torch.randn(8, 2, _PAGE, _KV_HEADS, _DIM, generator=generator).bfloat16()
    q = torch.randn(sum(_QUERIES), _HEADS, _DIM, generator=generator).bfloat16()
    offsets = _offsets(_QUERIES)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(1, device=device))
    wrapper.plan(
        [ints([0, sum(_QUERIES)]), ints(offsets)],
        [ints([0, len(_SHARED)]), ints(_offsets([len(pages) for pages in _OWN]))],
        [ints(_SHARED), ints([page for pages in _OWN for page in pages])],
        [ints([_PAGE]), ints(_LAST)],
        _HEADS,
        _KV_HEADS,
        _DIM,
        _PAGE,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    got = wrapper.run(q.to(device), cache.to(device)).cpu().double()
    want = torch.empty_like(got)
    for i, own in enumerate(_OWN):
        length = (len(_SHARED) + len(own) - 1) * _PAGE + _LAST[i]
        rows = slice(offsets[i], offsets[i + 1])
        keys, values = (cache[_SHARED + own, part].flatten(0, 1)[:length] for part in (0, 1))
        query = length - _QUERIES[i] + torch.arange(_QUERIES[i])[:, None]
        seen = torch.arange(length)[None] <= query
        for head in range(_HEADS):
            group = head // (_HEADS // _KV_HEADS)
            want[rows, head], _ = reference.attention(
                q[rows, head], keys[:, group], values[:, group], _DIM**-0.5, seen=seen
            )
    return float((got - want).norm() / want.norm()), ALLOWED


def _offsets(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)]
