"""Kimi Delta Attention for inference engines."""

from kda_backend.api import chunk_kda, fused_recurrent_kda

__all__ = ["chunk_kda", "fused_recurrent_kda"]
