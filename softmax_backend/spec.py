"""What a softmax-attention layer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from softmax_backend.variants import PLAIN, Variant

LATENT_DIM = 512
ROPE_DIM = 64
BLOCK_TOKENS = 64
"""Tokens per block of a step plan."""
MAX_QUERY_TOKENS = 8
MAX_SPLITS = 160
"""Most splits of one output row, as in FlashMLA's combine."""

CacheFormat = Literal["16-bit", "fp8", "fp8_ds_mla"]


@dataclass(frozen=True)
class MlaSpec:
    """An MLA layer in its absorbed form: all query heads share one latent head of keys and values.

    Attributes:
        num_heads: query heads on this rank, 1 to 128.
        query_tokens: per request and step, 1 to 8; more than one where drafts are verified.
        page_size: tokens per page of the cache.
        cache_format: ``"16-bit"``: latent and RoPE parts in the queries' dtype. ``"fp8"``: both in
            e4m3 with one scale per tensor. ``"fp8_ds_mla"``: 656 bytes per token, that is 512 e4m3,
            four float32 scales of 128 channels each, 64 bf16.
        dtype: of queries and output.
        variant: what one block does to logits, mask and keys.
    """

    num_heads: int
    page_size: int
    query_tokens: int = 1
    cache_format: CacheFormat = "16-bit"
    dtype: torch.dtype = torch.bfloat16
    variant: Variant = PLAIN

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads <= 128:
            raise ValueError(f"num_heads must be 1 to 128, got {self.num_heads}")
        if not 1 <= self.query_tokens <= MAX_QUERY_TOKENS:
            raise ValueError(
                f"query_tokens must be 1 to {MAX_QUERY_TOKENS}, got {self.query_tokens}"
            )
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        if self.cache_format not in ("16-bit", "fp8", "fp8_ds_mla"):
            raise ValueError(
                f"cache_format must be 16-bit, fp8 or fp8_ds_mla, got {self.cache_format!r}"
            )
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype}")

    @property
    def query_rows(self) -> int:
        """Rows of a request: query tokens times heads."""
        return self.query_tokens * self.num_heads

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve this layer."""
        needs = {f"{self.cache_format}_cache"}
        if self.page_size % 16:
            needs.add("any_page_size")
        if self.dtype != torch.bfloat16:
            needs.add("any_dtype")
        if self.variant != PLAIN:
            needs.add("variants")
        return frozenset(needs)
