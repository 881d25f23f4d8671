"""DeepSeek-V4's KV compressor: pooling, norm, RoPE, rotation, quantisation and paged store."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_backend.api import (
        compress_decode_,
        compress_norm_rope_hadamard_,
        compress_prefill_,
        quantise_indexer_queries,
        warm_up,
    )
    from dsv4_backend.compressor.bound import LaunchCache
    from dsv4_backend.spec import CompressorLayer, CompressorSpec
    from dsv4_backend.step_plan import (
        PagedDecode,
        PagedPrefill,
        RingDecode,
        RingPrefill,
        SeqLens,
        window_ends,
    )

__all__ = [
    "CompressorLayer",
    "CompressorSpec",
    "LaunchCache",
    "PagedDecode",
    "PagedPrefill",
    "RingDecode",
    "RingPrefill",
    "SeqLens",
    "compress_decode_",
    "compress_norm_rope_hadamard_",
    "compress_prefill_",
    "quantise_indexer_queries",
    "warm_up",
    "window_ends",
]

_MODULES = {
    "CompressorLayer": "dsv4_backend.spec",
    "CompressorSpec": "dsv4_backend.spec",
    "LaunchCache": "dsv4_backend.compressor.bound",
    "PagedDecode": "dsv4_backend.step_plan",
    "PagedPrefill": "dsv4_backend.step_plan",
    "RingDecode": "dsv4_backend.step_plan",
    "RingPrefill": "dsv4_backend.step_plan",
    "SeqLens": "dsv4_backend.step_plan",
    "compress_decode_": "dsv4_backend.api",
    "compress_norm_rope_hadamard_": "dsv4_backend.api",
    "compress_prefill_": "dsv4_backend.api",
    "quantise_indexer_queries": "dsv4_backend.api",
    "warm_up": "dsv4_backend.api",
    "window_ends": "dsv4_backend.step_plan",
}


def __getattr__(name: str) -> Any:
    # imported when first asked for: `dsv4_backend.family` is read where torch is not installed
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value
