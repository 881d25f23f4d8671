"""sglang: DeepSeek-V4's compressors on this backend, its attention as without a flag.

    sglang serve --model-path MODEL --attention-backend dsv4

The flag is `backend_core.engines.sglang_flag`'s. sglang serves DeepSeek-V4 with an attention
backend that it calls ``dsv4`` too and chooses by itself; once it is built for a model, the step
that all its compressors share becomes a `sglang_compressor.FusedStep`. Those of DeepSeek-V4.1 share
other methods, which become a `sglang_low_ratio.LowRatioSteps`'.
"""

from __future__ import annotations

from typing import Any

from backend_core.engines.sglang_flag import SglangLayerClaim, register_family


def register() -> None:
    """Make ``dsv4`` mean this package; see `sglang_flag.register_family` for what it raises."""
    claim = SglangLayerClaim("compressor", "DeepSeek-V4 compressor", _present, _install)
    register_family("dsv4", [claim])


def _present(backend: Any, runner: Any) -> bool:
    from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin

    return isinstance(backend, CompressorBackendMixin)


def _install(backend: Any, runner: Any) -> None:
    low_ratios = getattr(backend, "low_ratios", ())
    if low_ratios:
        from dsv4_backend.engines import sglang_low_ratio

        sglang_low_ratio.install(backend)
    if not low_ratios or backend.has_c4 or backend.has_c128:
        from dsv4_backend.engines import sglang_compressor

        sglang_compressor.install(backend)
