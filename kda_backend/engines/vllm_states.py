"""The dtype of KDA's states in vLLM's cache, as ``--mamba-ssm-cache-dtype`` asks for it.

vLLM asks the model's class for the size of a cache page, and the layer for the tensors in it.
Kimi-Linear's layer, and the layer and the model's class of AliceAI and Ling-V3, pass the option
over: a page of Kimi-Linear's is then too small for its states, and the server ends. All refuse
float16. With the flag each of them follows the option.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

from backend_core.engines.vllm_flag import requested

_HONOURS = "_kda_dsv4"  # on the function in the place of upstream's


class HonoursStateDtype:
    """Stands before the engine's class among the bases of a layer of ours."""

    cache_config: Any
    model_config: Any

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the convolution's windows and of the recurrent state."""
        return _state_dtype(self.model_config, self.cache_config)


def become_upstreams(layer: Any, upstream: Any, vllm_config: VllmConfig) -> None:
    """Turn a layer of ours into one of ``upstream``, its base class.

    Raises:
        ValueError: under the flag, where upstream's keeps states of another dtype than its pages
            were made for.
    """
    if requested(vllm_config) is not None:
        asked = layer.get_state_dtype()[1]
        try:
            kept = str(upstream.get_state_dtype(layer)[1])
        except ValueError as error:
            kept = f"others alone ({error})"
        if str(asked) != kept:
            raise ValueError(
                f"--mamba-ssm-cache-dtype asks for states in {asked}, and vLLM's own layer, which"
                f" serves {layer.prefix} for the reason that the log gives, keeps them in {kept}:"
                " serve without this option"
            )
    layer.__class__ = upstream


def honour_in_model(module: ModuleType, name: str) -> None:
    """Let a model's class of vLLM's, ``name`` of ``module``, size pages by the option under the
    flag; a second call changes nothing."""
    model = getattr(module, name)
    upstream = model.get_mamba_state_dtype_from_config.__func__
    if hasattr(upstream, _HONOURS):
        return

    def of_config(cls: Any, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        if requested(vllm_config) is None:
            found: tuple[torch.dtype, ...] = upstream(cls, vllm_config)
            return found
        return _state_dtype(vllm_config.model_config, vllm_config.cache_config)

    setattr(of_config, _HONOURS, True)
    model.get_mamba_state_dtype_from_config = classmethod(of_config)


def _state_dtype(model_config: Any, cache_config: Any) -> tuple[torch.dtype, torch.dtype]:
    asked = cache_config.mamba_ssm_cache_dtype
    windows, state = MambaStateDtypeCalculator.kda_state_dtype(
        model_config.dtype,
        cache_config.mamba_cache_dtype,
        "auto" if asked == "float16" else asked,
    )
    return windows, torch.float16 if asked == "float16" else state
