"""vLLM: its KDA layers on this backend.

    vllm serve MODEL --attention-backend KDA       # 0.32 and newer
    vllm serve MODEL --attention-backend CUSTOM    # 0.30 and 0.31, which take no new names

The flag is `backend_core.engines.vllm_flag`'s, which leaves the softmax layers to the platform or
to another family. vLLM builds a KDA layer as the class that is registered in place of its own by
name, once a model has imported the module that defines it: `vllm_layer` and one small file for each
model's layer. Without the flag that class turns into upstream's as it is built. The flag also has
vLLM capture longer prefill steps (`vllm_graphs`), and states of the dtype that the user asks for
(`vllm_states`).
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

from backend_core.engines import vllm_flag
from backend_core.engines.after_import import after_import
from backend_core.engines.vllm_flag import VllmLayerClaim
from kda_backend.engines import vllm_graphs

FAMILY = "kda"
LAYER = "KimiGatedDeltaNetAttention"


@dataclass(frozen=True)
class Replaced:
    """A class of vLLM's, and the module here that makes the class in its place.

    Attributes:
        name: of the class, by which vLLM looks for a replacement.
        adapter: has ``layer_class``.
        rocm: whether the class is ROCm's or all other platforms'; ``None`` where it is everyone's.
    """

    name: str
    adapter: str
    rocm: bool | None = None


# By the modules that define them: some for one platform, some moved between releases.
REPLACED = {
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": Replaced(LAYER, "vllm_packed"),
    "vllm.models.kimi_k3.nvidia.kda": Replaced("KimiK3DeltaAttention", "vllm_packed", rocm=False),
    "vllm.models.kimi_k3.amd.kda": Replaced("KimiK3DeltaAttention", "vllm_packed", rocm=True),
    "vllm.models.glm5next.common.kda": Replaced("Glm5NextLinearAttention", "vllm_glm"),
    "vllm.models.glm5next.nvidia.kda": Replaced("Glm5NextLinearAttention", "vllm_glm"),
    "vllm.model_executor.models.bailing_moe_v3": Replaced(
        "BailingMoeV3KimiDeltaAttention", "vllm_ling"
    ),
}


MODELS = {
    "vllm.model_executor.models.alice_ai": "AliceAIForCausalLM",
    "vllm.model_executor.models.bailing_moe_v3": "BailingMoeV3ForCausalLM",
    "vllm.models.kimi_k3.nvidia.model": "KimiLinearForCausalLM",
    "vllm.models.kimi_k3.amd.linear": "KimiLinearForCausalLM",
    "vllm.models.glm5next.common.model": "Glm5NextForCausalLM",
    "vllm.models.glm5next.nvidia.model": "Glm5NextForCausalLM",
}
"""Classes of models that size pages, by their modules; other classes ask these."""


def register() -> None:
    """Make the flag known and wait for vLLM's layers; a second call changes nothing."""
    claim = VllmLayerClaim(
        "linear_attention", "Kimi Delta Attention", tuple(REPLACED), replace_layer
    )
    vllm_flag.register_family(FAMILY, [claim])
    after_import("vllm.config.vllm", vllm_graphs.install)
    after_import("vllm.v1.worker.gpu.cudagraph_utils", vllm_graphs.leave_decodes)
    for module, model in MODELS.items():
        after_import(module, functools.partial(_honour_state_dtype, model))


def _honour_state_dtype(model: str, module: ModuleType) -> None:
    from kda_backend.engines.vllm_states import honour_in_model

    try:
        honour_in_model(module, model)
    except AttributeError as error:  # another release's class
        vllm_flag.say(f"the states of {model} keep vLLM's dtype: {error}")


def replace_layer(module: ModuleType) -> None:
    """Register our class in the place of the one that ``module``, of `REPLACED`, defines.

    Raises:
        RuntimeError: another plug-in has replaced it.
    """
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.platforms import current_platform

    replaced = REPLACED[module.__name__]
    if replaced.rocm not in (None, current_platform.is_rocm()):
        return  # another platform's class of the same name, which no model here builds
    present = op_registry_oot.get(replaced.name)
    upstream = getattr(module, replaced.name)
    if present is not None:
        if present.__module__.startswith("kda_backend.") and issubclass(present, upstream):
            return
        raise RuntimeError(f"another plug-in replaces {replaced.name}: {present.__module__}")
    adapter = importlib.import_module(f"kda_backend.engines.{replaced.adapter}")
    PluggableLayer.register_oot(adapter.layer_class(upstream), name=replaced.name)
