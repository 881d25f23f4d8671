"""The two calls of FlashMLA that engines make for DeepSeek-V4's attention, made here instead.

Imports no engine. Both engines pass the same arguments by the same names; `unknown` says where a
release does not.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from softmax_backend.contract.sparse_mla import NamedRows
from softmax_backend.engines.sparse_layer import SparseLayer

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
# what is read here ("out" if it is passed), and what holds no choice for these layers
READ = {
    DECODE: {
        *("q", "k_cache", "indices", "topk_length", "softmax_scale", "attn_sink", "out"),
        *("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
    },
    PREFILL: {"q", "kv", "indices", "topk_length", "sm_scale", "attn_sink", "out"},
}
FIXED = {
    DECODE: {
        *("block_table", "cache_seqlens", "head_dim_v", "is_fp8_kvcache"),
        "tile_scheduler_metadata",
    },
    PREFILL: {"d_v"},
}


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
    extra = NamedRows(
        call["extra_k_cache"].squeeze(2),
        call["extra_indices_in_kvcache"],
        call["extra_topk_length"],
    )
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


@functools.cache
def unknown(engine: str, method: Callable[..., Any], name: str) -> str | None:
    """What keeps a release's call of FlashMLA from being made here, in words.

    Args:
        method: the engine's, which calls the function ``name`` once.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    if len(calls) != 1 or calls[0].args:
        return f"{engine}'s {method.__qualname__} must call {name} once, by names"
    got = {str(keyword.arg) for keyword in calls[0].keywords}
    if odd := sorted(got - READ[name] - FIXED[name]):
        return f"{engine}'s {method.__qualname__} passes {name} arguments that are unknown: {odd}"
    if missing := sorted(READ[name] - {"out"} - got):
        return f"{engine}'s {method.__qualname__} must pass {name} {missing}"
    return None
