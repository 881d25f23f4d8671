"""What is fixed at model load: a compressor's properties and a layer's tensors.

Both are frozen and check their own contract when they are built. What changes every step is in
``step_plan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from backend_core.contracts import expect_dtype, expect_shape, expect_stride
from backend_core.formats import RECORD_FORMATS, CacheFormat, RecordFormat
from dsv4_backend.contract.values import (
    ROPE_DIM,
    ROW_DTYPES,
    check_norm_weight,
    check_rope_table,
    expect_one_of,
    expect_positive,
)

__all__ = [
    "ROPE_DIM",
    "CacheFormat",
    "CompressorLayer",
    "CompressorSpec",
    "Fp8Flavour",
    "RopeLayout",
    "Rounding",
    "real_rope_table",
]

Rounding = Literal["sglang", "vllm", "aiter"]
Fp8Flavour = Literal["ocp", "fnuz"]
RopeLayout = Literal["interleaved", "split"]


@dataclass(frozen=True)
class CompressorSpec:
    """The kind of a compressor, and the format in which its engine reads the rows back.

    Attributes:
        head_dim: 512 (main) or 128 (indexer).
        compress_ratio: tokens a window advances by, 4 (windows of 8, overlapping) or 128.
        cache_format: record format of a cached token, a key of ``RECORD_FORMATS``.
        page_tokens: the number of compressed tokens in a cache page.
        rounding: the engine whose rounding points and scale rules to follow (see
            ``docs/families/dsv4.md``); ``"aiter"`` is sglang's MXFP4 indexer on AMD.
        rotate: apply the Walsh-Hadamard rotation; then queries must be rotated too.
        fp8: e4m3 as ``"ocp"`` (largest code 448) or ``"fnuz"`` (bias 8, scaled to 224).
        rope_layout: a row of the table is 32 (cos, sin) pairs or 32 cosines and then 32 sines.
        eps: the constant of the RMSNorm.

    Raises:
        ValueError: a value outside these, or a format that does not go with the head dimension.
    """

    head_dim: int
    compress_ratio: int
    cache_format: CacheFormat
    page_tokens: int
    rounding: Rounding
    rotate: bool
    fp8: Fp8Flavour
    rope_layout: RopeLayout
    eps: float = 1e-6

    def __post_init__(self) -> None:
        expect_one_of("head_dim", self.head_dim, (128, 512))
        expect_one_of("compress_ratio", self.compress_ratio, (4, 128))
        expect_one_of("cache_format", self.cache_format, tuple(RECORD_FORMATS))
        expect_one_of("rounding", self.rounding, ("sglang", "vllm", "aiter"))
        expect_one_of("fp8", self.fp8, ("ocp", "fnuz"))
        expect_one_of("rope_layout", self.rope_layout, ("interleaved", "split"))
        expect_positive("page_tokens", self.page_tokens)
        expect_positive("eps", self.eps)
        if self.head_dim != self.record.head_dim:
            raise ValueError(
                f"cache_format {self.cache_format} must have head_dim {self.record.head_dim}, "
                f"got {self.head_dim}"
            )
        if (self.head_dim, self.compress_ratio) == (128, 128):
            raise ValueError("head_dim 128 must have compress_ratio 4, got 128")
        if self.page_tokens % self.record.tile_tokens:
            raise ValueError(
                f"page_tokens must be a multiple of {self.record.tile_tokens} for "
                f"{self.cache_format}, got {self.page_tokens}"
            )
        if self.cache_format == "indexer_mxfp4_planes" and self.page_tokens != 64:
            raise ValueError(
                f"page_tokens must be 64 for {self.cache_format}, got {self.page_tokens}"
            )
        if self.rounding == "aiter" and self.record.encoding != "indexer_mxfp4":
            raise ValueError(f"rounding aiter must go with MXFP4 records, got {self.cache_format}")
        if self.rotate and self.head_dim != 128:
            raise ValueError(f"rotate must go with head_dim 128, got {self.head_dim}")

    @property
    def kind(self) -> str:
        """By which the path tables' operators are named: indexer, main_c4 or main_c128."""
        return "indexer" if self.head_dim == 128 else f"main_c{self.compress_ratio}"

    @property
    def record(self) -> RecordFormat:
        return RECORD_FORMATS[self.cache_format]

    @property
    def halves(self) -> int:
        """C: channel groups of a token's row, 2 where windows overlap."""
        return 2 if self.compress_ratio == 4 else 1

    @property
    def window(self) -> int:
        """Rows of a pooling window: 8 or 128."""
        return self.halves * self.compress_ratio

    @property
    def row_width(self) -> int:
        """Elements of a token's [kv | score] row."""
        return 2 * self.halves * self.head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the cache, its gaps included; pages may be further apart than that."""
        return self.page_tokens * self.record.row_bytes

    @property
    def second_page_bytes(self) -> int:
        """The same of the second tensor's pages; 0 for formats that have none."""
        return self.page_tokens * self.record.second_bytes


@dataclass(frozen=True, eq=False)
class CompressorLayer:
    """A compressor's weights and tables; compared by identity.

    Attributes:
        ape: [ratio, halves, head_dim] fp32 or bf16, any strides but 1 in the last dimension:
            ``ape.view(r, c, d)`` of the checkpoint's [r, c·d], or
            ``ape8.view(2, 4, d).transpose(0, 1)`` of sglang's [8, d].
        norm_weight: [head_dim] fp32 or bf16.
        rope_table: [positions, 64] fp32 or bf16 in ``spec.rope_layout``, with the compressed
            layers' own frequencies (theta 160000, YaRN); also a complex64 [positions, 32].

    Raises:
        ValueError: a tensor does not have the shape, dtype or strides above.
    """

    spec: CompressorSpec
    ape: torch.Tensor
    norm_weight: torch.Tensor
    rope_table: torch.Tensor

    def __post_init__(self) -> None:
        spec, device = self.spec, self.ape.device
        if self.rope_table.is_complex():
            table = real_rope_table(self.rope_table, spec.rope_layout)
            object.__setattr__(self, "rope_table", table)
        expect_shape("ape", self.ape, (spec.compress_ratio, spec.halves, spec.head_dim))
        expect_dtype("ape", self.ape, *ROW_DTYPES)
        expect_stride("ape", self.ape, 2, 1)
        check_norm_weight("norm_weight", self.norm_weight, spec.head_dim, device)
        check_rope_table("rope_table", self.rope_table, device)


def real_rope_table(freqs_cis: torch.Tensor, layout: RopeLayout = "interleaved") -> torch.Tensor:
    """Complex [positions, 32] as real [positions, 64] in a layout; a real table as it is."""
    if not freqs_cis.is_complex():
        return freqs_cis
    if layout == "split":
        return torch.cat((freqs_cis.real, freqs_cis.imag), -1)
    return torch.view_as_real(freqs_cis).flatten(-2)
