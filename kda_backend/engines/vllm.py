"""vLLM: its KDA layers on this backend.

    vllm serve MODEL --attention-backend KDA       # 0.32 and newer
    vllm serve MODEL --attention-backend CUSTOM    # 0.26 to 0.31, which take no new names

The flag is `backend_core.engines.vllm_flag`'s, which leaves the softmax layers to the platform or
to another family. vLLM builds a KDA layer as the class that is registered in place of
``KimiGatedDeltaNetAttention``: `vllm_layer` and one small file for each form of vLLM's own layer.
Without the flag that class turns into upstream's as it is built.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from backend_core.engines import ENGINES, Engine, vllm_flag
from backend_core.engines.vllm_flag import LayerClaim
from backend_core.strict import fallback

FAMILY = "kda"
LAYER = "KimiGatedDeltaNetAttention"
_MODULE = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
# KDA layers of other classes, which also export prefill checkpoints, verify drafts by recomputation
# or norm outside of their core: they stay upstream's, which is said.
_NOT_REPLACED = {
    "vllm.models.kimi_k3.nvidia.kda": "KimiK3DeltaAttention",
    "vllm.models.kimi_k3.amd.kda": "KimiK3DeltaAttention",
    "vllm.models.glm5next.common.kda": "Glm5NextLinearAttention",
    "vllm.model_executor.models.bailing_moe_v3": "BailingMoeV3KimiDeltaAttention",
}
# The first release of each form of vLLM's layer, newest first.
# vllm_v026 goes when 0.26 is no longer supported; vllm_v027 when its layer changes form.
_FORMS = (("0.27.0", "vllm_v027"), ("0.26.0", "vllm_v026"))


def register() -> None:
    """Make the flag known and wait for vLLM's layer; a second call changes nothing."""
    claim = LayerClaim(
        "linear_attention", "Kimi Delta Attention", (_MODULE, *_NOT_REPLACED), _install
    )
    vllm_flag.register_family(FAMILY, [claim])


def _install(module: ModuleType) -> None:
    if module.__name__ == _MODULE:
        _replace_layer()
    else:
        vllm_flag.after_init(getattr(module, _NOT_REPLACED[module.__name__]), _say_not_replaced)


def _replace_layer() -> None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    version = ENGINES["vllm"].installed()
    assert version is not None  # the flag is registered
    form = next(module for first, module in _FORMS if Engine("vllm", first, None).supports(version))
    ours = importlib.import_module(f"kda_backend.engines.{form}").KdaLayer
    present = op_registry_oot.get(LAYER)
    if present is None:
        PluggableLayer.register_oot(ours, name=LAYER)
    elif present is not ours:
        raise RuntimeError(f"another plug-in replaces {LAYER}: {present.__module__}")


def _say_not_replaced(layer: Any, vllm_config: Any) -> None:
    kind = type(layer)
    fallback(
        f"--attention-backend {vllm_flag.requested(vllm_config)}: the KDA layers of"
        f" {kind.__module__}.{kind.__name__} are not replaced"
    )
