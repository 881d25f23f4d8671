"""The two calls of FlashMLA that engines make for DeepSeek-V4's attention, made here instead.

Imports no engine. Both engines pass the same arguments by the same names, which `make` looks at.
"""

from __future__ import annotations

from typing import Any

import torch

from backend_core.engines.calls import odd_arguments, odd_callee, odd_calls
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.engines.sparse_layer import SparseLayer

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
# what is read here, and "out" if it is passed; what holds no choice for these layers
READ = {
    DECODE: {
        *("q", "k_cache", "indices", "topk_length", "softmax_scale", "attn_sink"),
        *("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
    },
    PREFILL: {"q", "kv", "indices", "topk_length", "sm_scale", "attn_sink"},
}
FIXED = {
    DECODE: {
        *("block_table", "cache_seqlens", "head_dim_v", "is_fp8_kvcache"),
        *("tile_scheduler_metadata", "out"),
    },
    PREFILL: {"d_v", "out"},
}


def changed(caller: Any, decode: Any, prefill: Any) -> str | None:
    """Why the calls that an engine's class makes cannot be made here, asked at load.

    Args:
        decode, prefill: the functions that it calls.
    """
    for name, function in ((DECODE, decode), (PREFILL, prefill)):
        odd = odd_calls(caller, name, READ[name], FIXED[name])
        odd = odd or odd_callee(function, READ[name], FIXED[name])
        if odd is not None:
            return odd
    return None


def make(served: SparseLayer, name: str, call: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
    """Make a call; returns what FlashMLA's does, with ``None`` for statistics that nothing reads.

    Raises:
        ValueError: an argument is unknown or missing, or a tensor is not as `sparse_mla` takes it;
            nothing has been written then.
    """
    odd = odd_arguments(f"the call of {name}", call.keys(), READ[name], FIXED[name])
    if odd is not None:
        raise ValueError(odd)
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
