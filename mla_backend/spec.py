"""The description of an MLA layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LATENT_DIM = 512
ROPE_DIM = 64
BLOCK_TOKENS = 64
"""Tokens per block of a step plan."""
MAX_QUERY_TOKENS = 8
ROW_CLASSES = (8, 16, 32, 1024)
"""Query rows of a request, up to each of which paths and engines' kernels are compared alike."""
MAX_SPLITS = 160
"""Most splits of one output row, as in FlashMLA's combine."""


@dataclass(frozen=True)
class MlaSpec:
    """An MLA layer in its absorbed form: all query heads share one latent head of keys and values.

    Attributes:
        num_heads: query heads on this rank, 1 to 128.
        query_tokens: per request and step, 1 to 8; more than one where drafts are verified.
        page_size: tokens per page of the cache.
        dtype: of queries, cache and output.
    """

    num_heads: int
    page_size: int
    query_tokens: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads <= 128:
            raise ValueError(f"num_heads must be 1 to 128, got {self.num_heads}")
        if not 1 <= self.query_tokens <= MAX_QUERY_TOKENS:
            raise ValueError(
                f"query_tokens must be 1 to {MAX_QUERY_TOKENS}, got {self.query_tokens}"
            )
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype}")

    @property
    def query_rows(self) -> int:
        """Rows of a request: query tokens times heads."""
        return self.query_tokens * self.num_heads

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve this layer.

        One says up to how many query rows: in between, a number is judged as the next larger.
        """
        needs = {f"{next(most for most in ROW_CLASSES if self.query_rows <= most)}_rows"}
        if self.page_size % 16:
            needs.add("any_page_size")
        if self.dtype != torch.bfloat16:
            needs.add("any_dtype")
        return frozenset(needs)
