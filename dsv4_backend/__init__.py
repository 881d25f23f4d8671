"""DeepSeek-V4's KV compressor: pooling, norm, RoPE, rotation, quantisation and paged store."""

from dsv4_backend.api import (
    compress_decode_,
    compress_decode_pair_,
    compress_norm_rope_hadamard_,
    compress_prefill_,
    warm_up,
    warm_up_pair,
)
from dsv4_backend.queries import quantise_indexer_queries
from dsv4_backend.spec import CompressorLayer, CompressorSpec
from dsv4_backend.step_plan import (
    PagedDecode,
    PagedPrefill,
    RingDecode,
    RingDecodeV1,
    RingPrefill,
    RingPrefillV1,
    RowPlan,
    SeqLens,
    window_ends,
)

__all__ = [
    "CompressorLayer",
    "CompressorSpec",
    "PagedDecode",
    "PagedPrefill",
    "RingDecode",
    "RingDecodeV1",
    "RingPrefill",
    "RingPrefillV1",
    "RowPlan",
    "SeqLens",
    "compress_decode_",
    "compress_decode_pair_",
    "compress_norm_rope_hadamard_",
    "compress_prefill_",
    "quantise_indexer_queries",
    "warm_up",
    "warm_up_pair",
    "window_ends",
]
