"""FlashAttention 3 as sglang's backend calls it for MLA decodes, in float64 on a CPU.

Its compiled library needs a GPU's driver to load. What is put in its place is its mathematics, and
its names where sglang's backend imports them as it is built.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from tests.engines.mla.flash import attend_pages

calls: list[dict[str, Any]] = []
"""The arguments of every call since a test cleared it."""


def install() -> None:
    absent = {
        "sgl_kernel": ("merge_state_v2",),
        "sgl_kernel.flash_attn": (
            *("flash_attn_with_kvcache", "flash_attn_varlen_func", "get_scheduler_metadata"),
        ),
    }
    had = {name: sys.modules.get(name) for name in absent}
    for name, functions in absent.items():
        module = types.ModuleType(name)
        vars(module).update(dict.fromkeys(functions, _not_called))
        sys.modules[name] = module
    from sglang.srt.layers.attention import flashattention_backend

    flashattention_backend.get_device_capability = lambda: (9, 0)
    flashattention_backend.flash_attn_with_kvcache = flash_attn_with_kvcache
    build = flashattention_backend.FlashAttentionBackend.__init__
    kernels = sys.modules["sgl_kernel.flash_attn"]

    def build_with_kernels(self: Any, *args: Any, **options: Any) -> None:
        sys.modules["sgl_kernel.flash_attn"] = kernels
        try:
            build(self, *args, **options)
        finally:
            del sys.modules["sgl_kernel.flash_attn"]

    flashattention_backend.FlashAttentionBackend.__init__ = build_with_kernels
    for name, module in had.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


def _not_called(*args: Any, **options: Any) -> None:
    raise AssertionError("no test calls this")


def flash_attn_with_kvcache(
    *, q: torch.Tensor, qv: torch.Tensor, softmax_scale: float, causal: bool, **options: Any
) -> torch.Tensor:
    """Output ``[tokens, heads, 512]`` of queries of varying lengths over a paged cache."""
    calls.append({"q": q, **options})
    assert causal and options["ver"] == 3 and not options["return_softmax_lse"]
    caches = options["k_cache"], options["v_cache"]
    bounds, lengths = options["cu_seqlens_q"], options["cache_seqlens"]
    return attend_pages(q, qv, caches, options["page_table"], lengths, bounds, softmax_scale)
