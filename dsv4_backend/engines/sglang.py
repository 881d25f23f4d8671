"""sglang: DeepSeek-V4's compressors on this backend, its attention as without a flag.

    sglang serve --model-path MODEL --attention-backend dsv4

The flag is `backend_core.engines.sglang_flag`'s. sglang serves DeepSeek-V4 with an attention
backend that it calls ``dsv4`` too and chooses by itself; once it is built for a model, the step
that all its compressors share becomes a `sglang_compressor.FusedStep`. Those of DeepSeek-V4.1 share
other methods, which become a `sglang_v41.V41Steps`'.
"""

from __future__ import annotations

from typing import Any

from backend_core.engines.sglang_flag import SglangLayerClaim, register_family
from dsv4_backend.engines import seam_list


def register() -> None:
    """Make ``dsv4`` mean this package; see `sglang_flag.register_family` for what it raises."""
    v4 = SglangLayerClaim(
        kind="compressor",
        title="DeepSeek-V4 compressor",
        part=seam_list.SGLANG_V4,
        of_model=lambda config: config.get("model_type") == "deepseek_v4",
        present=_has_v4,
        install=_install_v4,
    )
    v41 = SglangLayerClaim(
        kind="compressor",
        title="DeepSeek-V4.1 compressor",
        part=seam_list.SGLANG_V41,
        of_model=lambda config: config.get("model_type") == "deepseek_v41",
        present=_has_v41,
        install=_install_v41,
    )
    register_family("dsv4", [v4, v41])


def _has_v4(backend: Any, runner: Any) -> bool:
    if not _compresses(backend):
        return False
    return not _has_v41(backend, runner) or backend.has_c4 or backend.has_c128


def _has_v41(backend: Any, runner: Any) -> bool:
    return _compresses(backend) and bool(getattr(backend, "low_ratios", ()))


def _compresses(backend: Any) -> bool:
    from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin

    return isinstance(backend, CompressorBackendMixin)


def _install_v4(backend: Any, runner: Any) -> None:
    from dsv4_backend.engines import sglang_compressor

    sglang_compressor.install(backend)


def _install_v41(backend: Any, runner: Any) -> None:
    from dsv4_backend.engines import sglang_v41

    sglang_v41.install(backend)
