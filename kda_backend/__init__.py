"""Kimi Delta Attention for inference engines."""

from kda_backend.api import chunk_kda, fused_recurrent_kda
from kda_backend.decode_step import kda_decode_step, kda_verify_step

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda_decode_step", "kda_verify_step"]
