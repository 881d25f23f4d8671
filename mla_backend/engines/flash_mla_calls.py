"""The two calls of FlashMLA that engines make for DeepSeek-V4's attention, made here instead.

Imports no engine. Both engines pass the same arguments by the same names, which `make` looks at.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.engines.seam_list import DECODE
from mla_backend.engines.sparse_layer import SparseLayer


def make(served: SparseLayer, name: str, call: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Make a call; returns what FlashMLA's does, with ``None`` for statistics that nothing reads.

    Raises:
        ValueError: a tensor is not as `sparse_mla` takes it; nothing has been written then.
    """
    if name == DECODE:
        return _decode(served, call), None
    return _prefill(served, call), None, None


def _decode(served: SparseLayer, call: dict[str, Any]) -> torch.Tensor:
    """Every query token is a request of one token, as engines hand them over, drafts too."""
    window = NamedRows(call["k_cache"].squeeze(2), call["indices"], call["topk_length"])
    extra, cache = None, call["extra_k_cache"]
    if cache is not None:
        indices, lengths = call["extra_indices_in_kvcache"], call["extra_topk_length"]
        extra = NamedRows(cache.squeeze(2), indices, lengths)
    sinks, scale = call["attn_sink"], call["softmax_scale"]
    return served.decode(call["q"], window, extra, scale=scale, sinks=sinks, out=call.get("out"))


def _prefill(served: SparseLayer, call: dict[str, Any]) -> torch.Tensor:
    rows = NamedRows(call["kv"].squeeze(1), call["indices"], call["topk_length"])
    out = call.get("out")
    return served.prefill(
        call["q"].unsqueeze(1),
        rows,
        scale=call["sm_scale"],
        sinks=call["attn_sink"],
        out=None if out is None else out.unsqueeze(1),
    ).squeeze(1)
