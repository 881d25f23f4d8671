"""sglang: DeepSeek-V4's attention on this family, where it is ahead of FlashMLA.

    sglang serve --model-path MODEL --attention-backend dsv4

The flag is `backend_core.engines.sglang_flag`'s. What serves is sglang's own attention backend, of
which the two calls of FlashMLA are made here (`sglang_sparse`). Dense MLA stays sglang's.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.utils.common import rank0_log

from backend_core.engines import ENGINES, Engine
from backend_core.engines.sglang_flag import LayerClaim, register_family

SERVED = Engine("sglang", "0.5.23", "0.5.23")
"""The releases whose calls of FlashMLA are known here."""


def register() -> None:
    """Make ``softmax`` known; see `sglang_flag.register_family` for what it raises."""
    claim = LayerClaim("sparse_mla", "DeepSeek-V4 attention", _present, _install)
    register_family("softmax", [claim])


def _present(backend: Any, runner: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_v4

    return bool(is_deepseek_v4(runner.model_config.hf_config))


def _install(backend: Any, runner: Any) -> None:
    version = ENGINES["sglang"].installed() or ""
    if not SERVED.supports(version):
        rank0_log(
            "kda-dsv4-backend: DeepSeek-V4 attention stays sglang's: its calls are made here in"
            f" {SERVED.supported}, got {version}"
        )
        return
    from softmax_backend.engines import sglang_sparse

    sglang_sparse.install(backend, runner)
