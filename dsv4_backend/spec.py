"""What is fixed at model load: a compressor's properties and a layer's tensors.

Both are frozen and check their own contract when they are built. What changes every step is in
``plans``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dsv4_backend import validation

CacheFormat = Literal["fp8_ds_mla", "bf16_rows", "fp8_rows", "indexer_fp8", "indexer_mxfp4"]
Rounding = Literal["official", "sglang", "vllm"]
Fp8Flavour = Literal["ocp", "fnuz"]
RopeLayout = Literal["interleaved", "split"]

ROPE_DIM = 64

# Bytes of data and of scales that one token has in a page.
RECORD_BYTES: dict[CacheFormat, tuple[int, int]] = {
    "fp8_ds_mla": (576, 8),
    "bf16_rows": (1024, 0),
    "fp8_rows": (512, 0),
    "indexer_fp8": (128, 4),
    "indexer_mxfp4": (64, 4),
}


@dataclass(frozen=True)
class CompressorSpec:
    """What kind of compressor this is and what its engine reads back.

    Attributes:
        head_dim: 512 (main) or 128 (indexer).
        compress_ratio: tokens a window advances by, 4 (windows of 8, overlapping) or 128.
        cache_format: layout of a cached token, a key of ``RECORD_BYTES``.
        page_tokens: compressed tokens in a cache page.
        rounding: whose rounding points and scale rules to follow (see ``docs/dsv4.md``).
        rotate: apply the Walsh-Hadamard rotation; then queries must be rotated too.
        fp8: e4m3 as ``"ocp"`` (largest code 448) or ``"fnuz"`` (bias 8, scaled to 224).
        rope_layout: a row of the table is 32 (cos, sin) pairs or 32 cosines and then 32 sines.
        eps: of the RMSNorm.

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
        validation.check_spec(self)

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
        """Bytes of a page that are in use; pages may be further apart than that."""
        return self.page_tokens * sum(RECORD_BYTES[self.cache_format])


@dataclass(frozen=True)
class CompressorLayer:
    """A compressor's weights and tables.

    Attributes:
        ape: [ratio, halves, head_dim] fp32 or bf16, any strides but 1 in the last dimension:
            ``ape.view(r, c, d)`` of the checkpoint's [r, c·d], or
            ``ape8.view(2, 4, d).transpose(0, 1)`` of sglang's [8, d].
        norm_weight: [head_dim] fp32 or bf16.
        rope_table: [positions, 64] fp32 or bf16 in ``spec.rope_layout``, with the compressed
            layers' own frequencies (theta 160000, YaRN); also a complex64 [positions, 32].
        fp8_scale: of ``"fp8_rows"``: a stored code times this is the value.
        ready: what ``compressor`` has found right, chosen and packed for calls of this layer.

    Raises:
        ValueError: a tensor does not have the shape, dtype or layout above.
    """

    spec: CompressorSpec
    ape: torch.Tensor
    norm_weight: torch.Tensor
    rope_table: torch.Tensor
    fp8_scale: float = 1.0
    ready: dict[tuple[object, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.rope_table.is_complex():
            object.__setattr__(self, "rope_table", real_rope_table(self.rope_table))
        validation.check_layer(self)


def real_rope_table(freqs_cis: torch.Tensor) -> torch.Tensor:
    """Complex [positions, 32] as real interleaved [positions, 64]; a real table as it is."""
    if not freqs_cis.is_complex():
        return freqs_cis
    return torch.view_as_real(freqs_cis).flatten(-2)
