"""FlashAttention 3 as vLLM's FLASH_ATTN_MLA calls it, in float64 on a CPU.

The compiled library needs a GPU's driver to load. What is put in its place is its mathematics, and
its names in the two modules from which vLLM's releases import them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.engines.mla.flash import attend_pages

calls: list[dict[str, Any]] = []
"""The arguments of every call since a test cleared it."""


def install() -> None:
    names = {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": get_scheduler_metadata,
    }
    utils = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    vars(utils).update(names)
    module = importlib.import_module("vllm.v1.attention.backends.mla.flashattn_mla")
    module.flash_attn_supports_mla = lambda: True
    module.get_flash_attn_version = lambda *args, **options: 3


def get_scheduler_metadata(*, batch_size: int, **options: Any) -> torch.Tensor:
    return torch.ones(1 + -(-batch_size // 4) * 4 * 4, dtype=torch.int32)


def flash_attn_varlen_func(
    *, q: torch.Tensor, q_v: torch.Tensor, softmax_scale: float, causal: bool, **options: Any
) -> torch.Tensor:
    """Output ``[tokens, heads, 512]`` of queries of varying lengths over a paged cache."""
    calls.append({"q": q, **options})
    assert causal and options["fa_version"] == 3 and not options["return_softmax_lse"]
    caches = options["k"], options["v"]
    bounds, lengths = options["cu_seqlens_q"], options["seqused_k"]
    return attend_pages(q, q_v, caches, options["block_table"], lengths, bounds, softmax_scale)
