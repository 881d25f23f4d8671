"""Sparse MLA in float64: the definition that the paths are compared with."""

from __future__ import annotations

import math

import torch

from mla_backend.reference import attention

NOPE_DIM, ROPE_DIM, GROUP = 448, 64, 64
DATA_BYTES, SCALE_BYTES = 576, 8


def read_records(cache: torch.Tensor) -> torch.Tensor:
    """The numbers of a cache of fp8_ds_mla records.

    Args:
        cache: ``[pages, page size, 584]`` bytes; of a page first the data of all its rows (448
            e4m3, 64 bf16), then their scales (7 UE8M0, one for each 64 e4m3; a byte without use).

    Returns:
        ``[pages, page size, 512]`` float64.
    """
    pages, size, _ = cache.shape
    width = DATA_BYTES + SCALE_BYTES
    raw = cache.view(torch.uint8).as_strided((pages, size * width), (cache.stride(0), 1))
    data = raw[:, : size * DATA_BYTES].reshape(pages, size, DATA_BYTES)
    codes = raw[:, size * DATA_BYTES :].reshape(pages, size, SCALE_BYTES)[..., :7]
    scales = torch.exp2(codes.double() - 127)
    scales = torch.where(codes == 255, math.nan, scales)
    nope = data[..., :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float().double()
    rope = data[..., NOPE_DIM:].contiguous().view(torch.bfloat16).double()
    return torch.cat([nope * scales.repeat_interleave(GROUP, -1), rope], -1)


def sparse_mla(
    q: torch.Tensor,
    lists: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
    scale: float,
    *,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token to the rows that its lists name.

    Args:
        q: ``[requests, query tokens, heads, 512]``.
        lists: for each cache its rows ``[rows, 512]`` as numbers, ``[requests, query tokens,
            topk]`` indices, and ``[requests]`` how many count or ``None``. Negative indices and
            those beyond the cache name nothing; a row that is named twice counts twice.
        sinks: ``[heads]`` logits that take a share of the weights and no part in the LSE.

    Returns:
        (output ``[requests, query tokens, heads, 512]``, LSE ``[requests, query tokens, heads]``),
        float64. Where nothing is named they are 0 and +inf.
    """
    requests, tokens, heads, dim = q.shape
    out = torch.zeros(requests, tokens, heads, dim, dtype=torch.float64, device=q.device)
    lse = torch.full((requests, tokens, heads), math.inf, dtype=torch.float64, device=q.device)
    for i in range(requests):
        for t in range(tokens):
            named = []
            for rows, indices, lengths in lists:
                count = indices.shape[2] if lengths is None else int(lengths[i])
                chosen = indices[i, t, : max(count, 0)].long()
                chosen = chosen[(chosen >= 0) & (chosen < rows.shape[0])]
                named.append(rows[chosen].double())
            kv = torch.cat(named)
            if not kv.shape[0]:
                continue
            out[i, t], lse[i, t] = attention(q[i, t], kv, kv, scale, sinks=sinks)
    return out, lse
