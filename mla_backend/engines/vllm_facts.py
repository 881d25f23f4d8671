"""Facts by which vLLM's MLA layers are chosen and served."""

from __future__ import annotations

from typing import Any

from mla_backend.spec import MAX_QUERY_TOKENS

KERNELS = {"FLASH_ATTN_MLA": "fa3"}
"""vLLM's backends for which a subclass exists, and the path tables' name of their decode."""


def query_tokens(vllm_config: Any) -> tuple[int, ...]:
    """Query tokens per request of the steps that may be decodes: with a draft, 1 more than it."""
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    return (1, 1 + drafts) if 0 < drafts < MAX_QUERY_TOKENS else (1,)


def one_rank_refusal(parallel_config: Any) -> str | None:
    """Why layers stay vLLM's where a request's cache is spread over ranks."""
    for what in ("decode", "prefill"):
        ranks = getattr(parallel_config, f"{what}_context_parallel_size")
        if ranks > 1:
            return f"a request must have its whole cache on one rank, got {ranks} {what} ranks"
    return None
