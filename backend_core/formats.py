"""Cache records: the bytes of one compressed token in a page, in the formats of the engines.

One family writes these records and another reads them, so the formats are stated here. There are
seven encodings:

=================  =============================================  ==============================
encoding           data of a token                                scales of a token
=================  =============================================  ==============================
fp8_ds_mla         448 e4m3, then 64 bf16 that RoPE turned        7 UE8M0, one per 64 e4m3; a 0
bf16_rows          512 bf16                                       none
indexer_fp8        128 e4m3                                       one fp32
indexer_fp8_ue8m0  128 e4m3                                       one UE8M0, four times
indexer_mxfp4      128 e2m1, the even channel in the low nibble   4 UE8M0, one per 32 channels
mxfp8_rows         512 e4m3                                       16 UE8M0, one per 32 channels
nvfp4_rows         512 e2m1, the even channel in the low nibble   32 e4m3, one per 16 channels
=================  =============================================  ==============================

UE8M0 is a power of two 2^k, stored as the byte k + 127.

In the formats of these names a page of P tokens holds their data one after another, then their
scales one after another; in ``mxfp8_rows`` and ``nvfp4_rows`` each token's scales follow its own
data. On AMD engines keep the same bytes in other places:

====================  ============================================================================
format                where the bytes of its encoding lie
====================  ============================================================================
indexer_fp8_tiles     data of 16 tokens x 16 channels together; scales as in indexer_fp8
indexer_mxfp4_tiles   data of 32 tokens x 16 bytes together; scales of 32 tokens x 2 groups
indexer_mxfp4_planes  data of 64 tokens x 16 bytes together; scales in a second tensor
fp8_two_pools         rows of 512 bytes: e4m3, then every scale twice; bf16 in a second tensor
====================  ============================================================================

``docs/families/dsv4.md`` has their byte maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Encoding = Literal[
    "fp8_ds_mla",
    "bf16_rows",
    "indexer_fp8",
    "indexer_fp8_ue8m0",
    "indexer_mxfp4",
    "mxfp8_rows",
    "nvfp4_rows",
]
CacheFormat = Literal[
    "fp8_ds_mla",
    "bf16_rows",
    "indexer_fp8",
    "indexer_mxfp4",
    "indexer_fp8_tiles",
    "indexer_fp8_ue8m0",
    "indexer_mxfp4_tiles",
    "indexer_mxfp4_planes",
    "fp8_two_pools",
    "mxfp8_rows",
    "nvfp4_rows",
]


@dataclass(frozen=True)
class RecordFormat:
    """Sizes of one record format.

    Attributes:
        encoding: what its bytes mean.
        head_dim: channels of a row.
        data_bytes, scale_bytes: of one token.
        row_bytes: of one token in the cache's page, with copies and gaps; by default all of them.
        second_bytes: of one token in the page of a second tensor.
        tile_tokens: tokens whose data lie together, of which a page has a multiple.
        is_interleaved: a token's scales follow its own data, not the data of the page.
    """

    encoding: Encoding
    head_dim: int
    data_bytes: int
    scale_bytes: int
    row_bytes: int = 0
    second_bytes: int = 0
    tile_tokens: int = 1
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.row_bytes:
            object.__setattr__(self, "row_bytes", self.record_bytes)

    @property
    def record_bytes(self) -> int:
        """Bytes of one token, data and scales."""
        return self.data_bytes + self.scale_bytes


RECORD_FORMATS: Mapping[CacheFormat, RecordFormat] = MappingProxyType(
    {
        "fp8_ds_mla": RecordFormat("fp8_ds_mla", 512, 576, 8),
        "bf16_rows": RecordFormat("bf16_rows", 512, 1024, 0),
        "indexer_fp8": RecordFormat("indexer_fp8", 128, 128, 4),
        "indexer_mxfp4": RecordFormat("indexer_mxfp4", 128, 64, 4),
        "indexer_fp8_ue8m0": RecordFormat("indexer_fp8_ue8m0", 128, 128, 4),
        "indexer_fp8_tiles": RecordFormat("indexer_fp8", 128, 128, 4, tile_tokens=16),
        "indexer_mxfp4_tiles": RecordFormat("indexer_mxfp4", 128, 64, 4, tile_tokens=32),
        "indexer_mxfp4_planes": RecordFormat("indexer_mxfp4", 128, 64, 4, 64, 4, tile_tokens=64),
        "fp8_two_pools": RecordFormat("fp8_ds_mla", 512, 576, 8, 512, 128),
        "mxfp8_rows": RecordFormat("mxfp8_rows", 512, 512, 16, is_interleaved=True),
        "nvfp4_rows": RecordFormat("nvfp4_rows", 512, 256, 32, is_interleaved=True),
    }
)
