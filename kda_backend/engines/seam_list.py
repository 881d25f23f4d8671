"""Seams of KDA's adapters in vLLM and sglang."""

from __future__ import annotations

from kda_backend.engines import sglang_seams, vllm_seams

SEAMS = (*vllm_seams.SEAMS, *sglang_seams.SEAMS)
