"""vLLM: its KDA layers on this backend, its softmax layers on the platform's own choice.

    vllm serve MODEL --attention-backend KDA       # 0.32 and newer
    vllm serve MODEL --attention-backend CUSTOM    # 0.26 to 0.31, which take no new names

The flag names `SoftmaxBackend`, which hands the MLA layers to what the platform would have chosen
without a flag. vLLM builds a KDA layer as the class that is registered in place of
``KimiGatedDeltaNetAttention``: `vllm_layer` and one small file for each form of vLLM's own layer.
Without the flag that class turns into the stock one as it is built.
"""

from __future__ import annotations

import importlib
from typing import Any

from backend_core.engines import ENGINES, Engine, vllm_flag
from backend_core.engines.vllm_flag import SoftmaxBackend, logger
from backend_core.strict import fallback

__all__ = ["SoftmaxBackend", "flag_name", "is_requested", "logger", "register"]

_FAMILY = "KDA"
_LAYER = "KimiGatedDeltaNetAttention"
# The first release of each form of vLLM's layer, newest first.
# vllm_v026 goes when 0.26 is no longer supported; vllm_v027 when its layer changes form.
_FORMS = (("0.27.0", "vllm_v027"), ("0.26.0", "vllm_v026"))

_broken: str | None = None


def register() -> None:
    """Make the flag known and put the layer in stock's place; a second call changes nothing.

    Never raises: an exception here would end every vLLM process, with or without the flag. What
    goes wrong is logged, and reported when the flag asks for this backend.
    """
    global _broken
    try:
        if vllm_flag.register_flag(_FAMILY, _refusal):
            _register_layer()
    except Exception as error:
        _broken = f"kda-dsv4-backend could not register with vllm: {type(error).__name__}: {error}"
        logger.warning("%s", _broken)


def flag_name() -> str:
    """What ``--attention-backend`` is to be given: its own name where the release takes one."""
    return vllm_flag.flag_name(_FAMILY)


def is_requested(vllm_config: Any) -> bool:
    """Whether the user passed the flag, for all layers or for one kind of them."""
    return vllm_flag.is_requested(vllm_config, _FAMILY)


def _refusal(vllm_config: Any) -> str | None:
    """Why the model's softmax layers are not handed to the platform: it has no KDA layers."""
    model = vllm_config.model_config
    linear = getattr(model.hf_text_config, "linear_attn_config", None)
    if not isinstance(linear, dict) or not linear.get("kda_layers"):
        return (
            f"--attention-backend {flag_name()} is for Kimi-Linear, whose configuration names"
            f" kda_layers, got {model.architecture}"
        )
    if _broken is not None:
        fallback(_broken)
    if linear.get("use_full_rank_gate"):
        # their forward also exports prefill checkpoints and verifies drafts by recomputation
        fallback("Kimi-K3's KDA layers are a class of vllm that this backend does not replace")
    return None


def _register_layer() -> None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    version = ENGINES["vllm"].installed()
    assert version is not None  # the flag is registered
    form = next(module for first, module in _FORMS if Engine("vllm", first, None).supports(version))
    ours = importlib.import_module(f"kda_backend.engines.{form}").KdaLayer
    present = op_registry_oot.get(_LAYER)
    if present is None:
        PluggableLayer.register_oot(ours, name=_LAYER)
    elif present is not ours:
        raise RuntimeError(f"another plug-in replaces {_LAYER}: {present.__module__}")
