"""Cache records: the bytes of one compressed token in a page, in the formats of the engines.

A page of P tokens holds their data one after another, then their scales one after another. One
family writes these records and another reads them, so the formats are stated here.

=============  =============================================  ==============================
format         data of a token                                scales of a token
=============  =============================================  ==============================
fp8_ds_mla     448 e4m3, then 64 bf16 that RoPE turned        7 UE8M0, one per 64 e4m3; a 0
bf16_rows      512 bf16                                       none
indexer_fp8    128 e4m3                                       one fp32
indexer_mxfp4  128 e2m1, the even channel in the low nibble   4 UE8M0, one per 32 channels
=============  =============================================  ==============================

UE8M0 is a power of two 2^k, stored as the byte k + 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

CacheFormat = Literal["fp8_ds_mla", "bf16_rows", "indexer_fp8", "indexer_mxfp4"]


@dataclass(frozen=True)
class RecordFormat:
    """Sizes of one record format.

    Attributes:
        head_dim: channels of a row.
        data_bytes, scale_bytes: of one token.
    """

    head_dim: int
    data_bytes: int
    scale_bytes: int

    @property
    def record_bytes(self) -> int:
        """Bytes of one token, data and scales."""
        return self.data_bytes + self.scale_bytes


RECORD_FORMATS: Mapping[CacheFormat, RecordFormat] = MappingProxyType(
    {
        "fp8_ds_mla": RecordFormat(512, 576, 8),
        "bf16_rows": RecordFormat(512, 1024, 0),
        "indexer_fp8": RecordFormat(128, 128, 4),
        "indexer_mxfp4": RecordFormat(128, 64, 4),
    }
)
