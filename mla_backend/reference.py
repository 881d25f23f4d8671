"""The operators in float64: the definition that the paths are compared with.

The log-sum-exp (LSE) of an output row is that of its scaled logits, base e, here and in every
operator of `mla_backend.api`; splits in scratch memory carry theirs in base 2, and so do the
drop-ins for FlashInfer, as FlashInfer does. A row that sees no key has output 0 and LSE +inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Logits = Callable[[torch.Tensor], torch.Tensor]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    seen: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    logits: Logits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale q k^T) v`` of one head.

    Args:
        q: ``[rows, D]``; k: ``[keys, D]``; v: ``[keys, DV]``.
        seen: ``[rows, keys]`` bool, which keys a row sees; by default all.
        sinks: ``[rows]`` logits that take a share of the weights and no part in the LSE.
        logits: what becomes of the scaled logits.

    Returns:
        (output ``[rows, DV]``, LSE ``[rows]``), float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    s = scale * q @ k.T
    if logits is not None:
        s = logits(s)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    none = lse == -math.inf
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double())
    p = torch.exp(s - torch.where(none, 0.0, total)[:, None])
    p = p.masked_fill(none[:, None], 0.0)
    return p @ v, torch.where(none, math.inf, lse)


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_latent: torch.Tensor,
    kv_rope: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode over a paged cache of plain numbers.

    Args:
        q_latent: ``[requests, query tokens, heads, 512]``; q_rope: the same with 64.
        kv_latent: ``[pages, page size, 512]``; kv_rope: ``[pages, page size, 64]``.
        block_table: ``[requests, pages]``; lengths: ``[requests]``.
        sinks: ``[heads]``.

    Returns:
        (output ``[requests, query tokens, heads, 512]``, LSE ``[requests, query tokens, heads]``).
    """
    requests, tokens, heads, dim = q_latent.shape
    page_size = kv_latent.shape[1]
    out = torch.zeros(requests, tokens, heads, dim, dtype=torch.float64, device=q_latent.device)
    lse = torch.full((requests, tokens, heads), math.inf, dtype=torch.float64, device=out.device)
    for i, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        pages = block_table[i, : -(-length // page_size)].long()
        v = kv_latent[pages].flatten(0, 1)[:length]
        k = torch.cat([v, kv_rope[pages].flatten(0, 1)[:length]], 1)
        q = torch.cat([q_latent[i], q_rope[i]], -1).flatten(0, 1)
        position = torch.arange(length, device=out.device)[None]
        token = torch.arange(tokens, device=out.device).repeat_interleave(heads)[:, None]
        query_position = length - tokens + token
        seen = position <= query_position if causal else position >= 0
        seen = seen.expand(tokens * heads, length)
        row_sinks = None if sinks is None else sinks.repeat(tokens)
        b_out, b_lse = attention(q, k, v, scale, seen=seen, sinks=row_sinks)
        out[i], lse[i] = b_out.view(tokens, heads, dim), b_lse.view(tokens, heads)
    return out, lse


def combine(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the splits of output rows, with FlashMLA's rules.

    Args:
        partial_out: ``[splits, rows, D]``; partial_lse: ``[splits, rows]``, base 2. A split with
            LSE -inf adds nothing, whatever its output holds.
        sinks: ``[rows]`` natural logits.

    Returns:
        (output ``[rows, D]``, natural LSE ``[rows]``), float64. Where every split is -inf the
        output is 0 and the LSE +inf; where a split's LSE is NaN the output is NaN and the LSE
        +inf.
    """
    lse2 = partial_lse.double()
    top = lse2.amax(0)
    shift = torch.where(top == -math.inf, 0.0, top)
    total = torch.exp2(lse2 - shift).sum(0)
    none = (total == 0) | total.isnan()
    lse = torch.where(none, math.inf, torch.log2(total) + shift)
    weight = lse
    if sinks is not None:
        weight = torch.log2(total + torch.exp2(sinks.double() / math.log(2) - shift)) + shift
        weight = torch.where(none, lse, weight)
    factor = torch.exp2(lse2 - weight)[..., None]
    out = torch.where(factor == 0, 0.0, partial_out.double() * factor).sum(0)
    return out, lse * math.log(2)
