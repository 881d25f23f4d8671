"""MLA decode in torch, one request after another: the path of a CPU."""

from __future__ import annotations

import math

import torch

from backend_core.autocast import without_autocast
from backend_core.tables.schema import Row
from backend_core.target import Target
from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.decode import Planning, PreparedDecode, ctas_of
from mla_backend.plan.fill import fill_in_torch
from mla_backend.scratch import SplitScratch
from mla_backend.spec import LATENT_DIM, MlaSpec


def bind(row: Row, spec: MlaSpec, target: Target) -> TorchDecode:
    return TorchDecode()


def plan(row: Row, spec: MlaSpec, num_sms: int, shares: bool) -> Planning:
    return Planning(ctas_of(spec, num_sms, shares), False, False, fill_in_torch)


class TorchDecode:
    """Float32 arithmetic; nothing is prepared."""

    def prepare(self, x: MlaInputs) -> PreparedDecode:
        return decode


@without_autocast
def decode(x: MlaInputs, scratch: SplitScratch) -> None:
    """Float32 arithmetic over each request's keys, gathered from its pages.

    A request is computed on its own, so its result depends on nothing else in the batch.
    """
    tokens, heads = x.spec.query_tokens, x.spec.num_heads
    lengths = x.plan.lengths.tolist()
    tables = [_pages(x, i, length) for i, length in enumerate(lengths)]
    for i, length in enumerate(lengths):
        if length <= 0:
            x.out[i], x.lse[i] = 0, math.inf
            continue
        latent, rope = _keys(x, tables[i], length)
        position = torch.arange(length, device=latent.device)
        q = torch.cat([part[i] for part in x.q], -1).flatten(0, 1).float()
        s = (q @ torch.cat([latent, rope], 1).T) * x.scale
        token = torch.arange(tokens, device=q.device).repeat_interleave(heads)[:, None]
        query = length - tokens + token
        seen = position[None] <= query if x.causal else (position >= 0)[None]
        seen = seen.expand(tokens * heads, length)
        s = s.masked_fill(~seen, -math.inf)
        lse = torch.logsumexp(s, -1)
        none = lse == -math.inf
        # exp(s - lse) would have the rounding of a large lse
        p = torch.softmax(s, -1)
        if x.sinks is not None:
            p = p * torch.sigmoid(lse - x.sinks.repeat(tokens))[:, None]
        p = p.masked_fill(none[:, None], 0)
        x.out[i] = (p @ latent).view(tokens, heads, LATENT_DIM).to(x.out.dtype)
        x.lse[i] = lse.masked_fill(none, math.inf).view(tokens, heads)


def _pages(x: MlaInputs, request: int, length: int) -> torch.Tensor:
    """A request's pages, int64.

    Raises:
        ValueError: the block table or the cache has fewer.
    """
    count, width = -(-max(length, 0) // x.spec.page_size), x.block_table.shape[1]
    if count > width:
        raise ValueError(
            f"block_table must have {count} pages for the {length} tokens of request {request},"
            f" got {width}"
        )
    pages = x.block_table[request, :count].long()
    last = x.kv[0].shape[0] - 1
    if count and not 0 <= int(pages.min()) <= int(pages.max()) <= last:
        raise ValueError(
            f"block_table must have pages 0 to {last} for request {request}, got {pages.tolist()}"
        )
    return pages


def _keys(x: MlaInputs, pages: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's keys, float32: latent ``[length, 512]`` and RoPE ``[length, 64]``."""
    latent, rope = (part[pages].flatten(0, 1)[:length].float() for part in x.kv)
    return latent, rope
