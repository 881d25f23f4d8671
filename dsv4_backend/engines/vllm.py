"""vLLM: DeepSeek-V4's compressors on this backend, its attention as without a flag.

    vllm serve MODEL --attention-backend DSV4

The flag is `backend_core.engines.vllm_flag`'s. vLLM builds a compressor as ``DeepseekCompressor``,
a plain module. Its ``__init__`` ends with the decision: with the flag, and where this backend
serves it, the compressor becomes a `vllm_compressor.FusedCompressor`; otherwise it stays what it
is. In DeepSeek-V4.1 the attention layer decides so, which has both the compressor and the indexer
whose keys are made of its latents (`vllm_v41`).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from backend_core.engines import seams, vllm_flag
from backend_core.engines.vllm_flag import VllmLayerClaim
from backend_core.strict import fallback
from dsv4_backend.engines import seam_list

FAMILY = "dsv4"
COMPRESSOR = "vllm.models.deepseek_v4.compressor"
ATTENTION_V41 = "vllm.models.deepseek_v41.attention"


def register() -> None:
    """Make the flag known and wait for vLLM's compressor; a second call changes nothing."""
    modules = (COMPRESSOR, ATTENTION_V41)
    claim = VllmLayerClaim("compressor", "DeepSeek-V4 compressor", modules, _install)
    vllm_flag.register_family(FAMILY, [claim])


def _install(module: ModuleType) -> None:
    """Let the class of compressors, or of V4.1's layers, end its ``__init__`` with a decision."""
    if module.__name__ == COMPRESSOR:
        vllm_flag.after_init(module.DeepseekCompressor, adopt)
    else:
        vllm_flag.after_init(module.DeepseekV4Attention, adopt)


def adopt(built: Any, vllm_config: Any) -> None:
    """Take over a compressor that vLLM just built, or say why it stays upstream's.

    Args:
        built: a compressor of V4, or an attention layer of V4.1, which may have one.

    Raises:
        FallbackError: it stays upstream's, in strict mode.
    """
    reason = vllm_flag.broken(FAMILY)
    if reason is None:
        try:
            reason = _adopt(built, vllm_config)
        except Exception as error:
            reason = vllm_flag.report_broken(FAMILY, error)
    if reason is not None:
        fallback(f"--attention-backend {vllm_flag.requested(vllm_config)}: {reason}")


def _adopt(built: Any, vllm_config: Any) -> str | None:
    is_v41 = hasattr(built, "compressor")
    if is_v41 and built.compressor is None:
        return None  # the layer reads another one's records
    reason = seams.refusal(seam_list.VLLM_V41 if is_v41 else seam_list.VLLM_V4)
    if reason is None:
        name = "vllm_v41" if is_v41 else "vllm_compressor"
        ours = importlib.import_module(f"dsv4_backend.engines.{name}")
        reason = ours.adopt(built, vllm_config)
    return reason
