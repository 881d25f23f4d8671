"""sglang: DeepSeek-V4's compressors on this backend, its attention as without a flag.

    sglang serve --model-path MODEL --attention-backend dsv4

The flag is `backend_core.engines.sglang_flag`'s. sglang serves DeepSeek-V4 with an attention
backend that it calls ``dsv4`` too and chooses by itself; once it is built for a model, the step
that all its compressors share becomes a `sglang_compressor.FusedStep`.
"""

from __future__ import annotations

from typing import Any

from backend_core.engines.sglang_flag import models_of, register_flag
from backend_core.strict import fallback


def register() -> None:
    """Make ``dsv4`` mean this package; see `sglang_flag.register_flag` for what it raises."""
    register_flag("dsv4", exchange_step)


def exchange_step(backend: Any, runner: Any) -> None:
    """Put our step into sglang's ``backend``.

    A draft model of speculative decoding need not have compressors.
    """
    from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin

    from dsv4_backend.engines import sglang_compressor

    if isinstance(backend, CompressorBackendMixin):
        sglang_compressor.install(backend)
    elif not runner.is_draft_worker:
        fallback(f"{models_of(runner)} has no compressors of DeepSeek-V4")
