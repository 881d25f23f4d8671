"""FlashAttention 3 as vLLM's FLASH_ATTN_MLA calls it, in float64 on a CPU.

The compiled library needs a GPU's driver to load. What is put in its place is its mathematics, and
its names in the two modules from which vLLM's releases import them.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

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
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    **options: Any,
) -> torch.Tensor:
    """Output ``[tokens, heads, 512]`` of queries of varying lengths over a paged cache."""
    calls.append({"q": q, "seqused_k": seqused_k, **options})
    assert causal and options["fa_version"] == 3 and not options["return_softmax_lse"]
    out = torch.zeros_like(q_v)
    bounds = cu_seqlens_q.tolist()
    for request, length in enumerate(seqused_k.tolist()):
        tokens = range(bounds[request], bounds[request + 1])
        pages = block_table[request, : -(-length // k.shape[1])].long()
        rope = k[pages].flatten(0, 1)[:length, 0].double()
        latent = v[pages].flatten(0, 1)[:length, 0].double()
        for token in tokens:
            seen = length - (tokens.stop - 1 - token)
            s = q[token].double() @ rope[:seen].T + q_v[token].double() @ latent[:seen].T
            out[token] = ((s * softmax_scale).softmax(-1) @ latent[:seen]).to(out.dtype)
    return out
