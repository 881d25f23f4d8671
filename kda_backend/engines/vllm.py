"""vLLM: its KDA layers on this backend.

    vllm serve MODEL --attention-backend KDA

The flag is `backend_core.engines.vllm_flag`'s, which leaves the softmax layers to the platform or
to another family. vLLM builds a KDA layer as the class that is registered in place of its own by
name, once a model has imported the module that defines it: `vllm_layer` and one small file for each
model's layer. Without the flag that class turns into upstream's as it is built. The flag also has
vLLM capture longer prefill steps (`vllm_graphs`), keep states of the dtype that the user asks for
(`vllm_states`), and, if the user asks for that, cut prompts where bits stay the same (`vllm_cuts`)
and commit drafts from records (`vllm_drafts`, `vllm_records`).
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from backend_core.engines import seams, vllm_flag
from backend_core.engines.after_import import after_import
from backend_core.engines.seams import Part
from backend_core.engines.vllm_flag import VllmLayerClaim
from backend_core.strict import fallback
from kda_backend.engines import vllm_cuts, vllm_graphs, vllm_seams

FAMILY = "kda"
LAYER = "KimiGatedDeltaNetAttention"


@dataclass(frozen=True)
class Replaced:
    """A class of vLLM's, and the module here that makes the class in its place.

    Attributes:
        name: of the class, by which vLLM looks for a replacement.
        adapter: has ``layer_class``.
        part: what the adapter relies on.
        rocm: whether the class is ROCm's or all other platforms'; ``None`` where it is everyone's.
    """

    name: str
    adapter: str
    part: Part
    rocm: bool | None = None


# by the modules that define them, some for one platform
REPLACED = {
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": Replaced(
        LAYER, "vllm_packed", vllm_seams.KIMI_LINEAR
    ),
    "vllm.models.kimi_k3.nvidia.kda": Replaced(
        "KimiK3DeltaAttention", "vllm_packed", vllm_seams.K3_NVIDIA, rocm=False
    ),
    "vllm.models.kimi_k3.amd.kda": Replaced(
        "KimiK3DeltaAttention", "vllm_packed", vllm_seams.K3_AMD, rocm=True
    ),
    "vllm.models.glm5next.common.kda": Replaced(
        "Glm5NextLinearAttention", "vllm_glm", vllm_seams.GLM
    ),
    "vllm.model_executor.models.bailing_moe_v3": Replaced(
        "BailingMoeV3KimiDeltaAttention", "vllm_ling", vllm_seams.LING
    ),
}


def register() -> None:
    """Make the flag known and wait for vLLM's layers; a second call changes nothing."""
    claim = VllmLayerClaim(
        "linear_attention", "Kimi Delta Attention", tuple(REPLACED), replace_layer
    )
    vllm_flag.register_family(FAMILY, [claim])
    after_import("vllm.config.vllm", vllm_graphs.install)
    after_import("vllm.v1.worker.gpu.cudagraph_utils", vllm_graphs.leave_decodes)
    after_import("vllm.v1.worker.gpu.cudagraph_utils", vllm_graphs.capture_layers)
    after_import("vllm.config.vllm", vllm_cuts.leave_prefixes)
    after_import("vllm.v1.core.sched.scheduler", vllm_cuts.cut_prompts)
    after_import(
        "vllm.model_executor.layers.attention.mla_attention", vllm_cuts.read_from_the_cache
    )
    for part in vllm_seams.SIZING:
        module, _, model = part.seams[-1].place.partition(":")
        act = functools.partial(_honour_state_dtype, model.partition(".")[0], part)
        after_import(module, act)


def _honour_state_dtype(model: str, part: Part, module: ModuleType) -> None:
    if seams.difference(part) is None:
        from kda_backend.engines.vllm_states import honour_in_model

        honour_in_model(module, model)


def replace_layer(module: ModuleType) -> None:
    """Register our class in the place of the one that ``module``, of `REPLACED`, defines; where
    this release's cannot be replaced it says so as it is built under the flag.

    Raises:
        RuntimeError: another plug-in has replaced it.
    """
    from vllm.platforms import current_platform

    replaced = REPLACED[module.__name__]
    if replaced.rocm not in (None, current_platform.is_rocm()):
        return  # another platform's class of the same name, which no model here builds
    if (reason := seams.difference(replaced.part)) is not None:
        if (kind := getattr(module, replaced.name, None)) is not None:
            vllm_flag.after_init(kind, functools.partial(_stays, reason))
        return
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    present = op_registry_oot.get(replaced.name)
    upstream = getattr(module, replaced.name)
    if present is not None:
        if present.__module__.startswith("kda_backend.") and issubclass(present, upstream):
            return
        raise RuntimeError(f"another plug-in replaces {replaced.name}: {present.__module__}")
    adapter = importlib.import_module(f"kda_backend.engines.{replaced.adapter}")
    kind = adapter.layer_class(upstream, replaced.part)
    PluggableLayer.register_oot(kind, name=replaced.name)


def _stays(reason: str, layer: object, vllm_config: Any) -> None:
    fallback(f"--attention-backend {vllm_flag.requested(vllm_config)}: {reason}")
