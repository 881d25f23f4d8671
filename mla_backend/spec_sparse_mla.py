"""A layer of sparse MLA: DeepSeek-V4's attention to named rows of one or two caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEAD_DIM = 512
"""Channels of a row, which is key and value: 448, and 64 behind RoPE."""
MAX_HEADS = 128

SparseCacheFormat = Literal["fp8_ds_mla", "bf16_rows"]


@dataclass(frozen=True)
class SparseMlaSpec:
    """One kind of layer.

    Attributes:
        num_heads: query heads on this rank, 1 to 128.
        cache_format: ``"fp8_ds_mla"``: pages of records (`backend_core.formats`), decode and
            prefill. ``"bf16_rows"``: rows of 512 bf16 that prefill has gathered.
        page_size: rows of a page; 1 for ``"bf16_rows"``.
        extra_page_size: of the second cache; 0 where there is none.
    """

    num_heads: int
    cache_format: SparseCacheFormat = "fp8_ds_mla"
    page_size: int = 1
    extra_page_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads must be 1 to {MAX_HEADS}, got {self.num_heads}")
        if self.cache_format not in ("fp8_ds_mla", "bf16_rows"):
            raise ValueError(
                f"cache_format must be fp8_ds_mla or bf16_rows, got {self.cache_format!r}"
            )
        if self.page_size < 1 or self.extra_page_size < 0:
            raise ValueError(
                "page_size must be at least 1 and extra_page_size at least 0, got"
                f" {self.page_size} and {self.extra_page_size}"
            )
        if self.cache_format == "bf16_rows" and (self.page_size, self.extra_page_size) != (1, 0):
            raise ValueError(
                "page_size and extra_page_size must be 1 and 0 for bf16_rows, got"
                f" {self.page_size} and {self.extra_page_size}"
            )

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve this layer.

        One says up to how many heads: in between, a number is judged as the next larger.
        """
        heads = next(most for most in (16, 32, 64, MAX_HEADS) if self.num_heads <= most)
        return frozenset({f"{self.cache_format}_cache", f"{heads}_heads"})
