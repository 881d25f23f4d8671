"""vLLM: DeepSeek-V4's compressors on this backend, its attention as without a flag.

    vllm serve MODEL --attention-backend DSV4      # 0.32 and newer
    vllm serve MODEL --attention-backend CUSTOM    # 0.30 and 0.31, which take no new names

The flag is `backend_core.engines.vllm_flag`'s. vLLM builds a compressor as ``DeepseekCompressor``,
a plain module. Its ``__init__`` ends with the decision: with the flag, and where this backend
serves it, the compressor becomes a `vllm_compressor.FusedCompressor`; otherwise it stays what it
is.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from backend_core.engines import vllm_flag
from backend_core.engines.vllm_flag import LayerClaim
from backend_core.strict import fallback

FAMILY = "dsv4"
# DeepSeek-V4.1's is another class: not replaced; logged once
COMPRESSORS = ("vllm.models.deepseek_v4.compressor", "vllm.models.deepseek_v41.compressor")
_ATTENTION = "vllm.models.deepseek_v4.attention"
ROTATE = "rotate_indexer"  # in --additional-config


def register() -> None:
    """Make the flag known and wait for vLLM's compressor; a second call changes nothing."""
    claim = LayerClaim("compressor", "DeepSeek-V4 compressor", (*COMPRESSORS, _ATTENTION), _install)
    vllm_flag.register_family(FAMILY, [claim])


def _install(module: ModuleType) -> None:
    """Let the class of compressors, or of indexers, end its ``__init__`` with a decision."""
    if module.__name__ in COMPRESSORS:
        vllm_flag.after_init(module.DeepseekCompressor, adopt)
    else:
        vllm_flag.after_init(module.DeepseekV4Indexer, rotate)


def adopt(compressor: Any, vllm_config: Any) -> None:
    """Take over a compressor that vLLM just built, or say why it stays upstream's.

    Raises:
        FallbackError: it stays upstream's, in strict mode.
    """
    reason = vllm_flag.broken(FAMILY)
    if reason is None:
        try:
            ours = importlib.import_module("dsv4_backend.engines.vllm_compressor")
            reason = ours.adopt(compressor, vllm_config)
        except Exception as error:
            reason = vllm_flag.report_broken(FAMILY, error)
    if reason is not None:
        fallback(f"--attention-backend {vllm_flag.requested(vllm_config)}: {reason}")


def rotate(indexer: Any, vllm_config: Any) -> None:
    """Rotate an indexer's keys and queries where the user asks for it.

    Raises:
        ValueError: the setting is no boolean.
        RuntimeError: this indexer cannot be rotated and another one already was.
    """
    config = vllm_config.additional_config
    wanted = config.get(ROTATE, False) if isinstance(config, dict) else False
    if not isinstance(wanted, bool):
        raise ValueError(f"--additional-config {ROTATE} must be true or false, got {wanted!r}")
    if not wanted:
        return
    reason = vllm_flag.broken(FAMILY)
    if reason is None:
        ours = importlib.import_module("dsv4_backend.engines.vllm_rotation")
        reason = ours.rotate(indexer, vllm_config)
    if reason is not None:
        fallback(f"--additional-config {ROTATE}: {reason}; nothing is rotated")
