"""The KDA layer of Kimi-Linear in vLLM 0.27 to 0.33. To be removed when vLLM's changes again."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

from kda_backend.engines.vllm_layer import runtime_of
from kda_backend.engines.vllm_packed import PackedCore


class KdaLayer(PackedCore, KimiGatedDeltaNetAttention):  # type: ignore[misc]
    def __init__(self, config: KimiLinearConfig, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        runtime = runtime_of(vllm_config, self, self.gate_lower_bound)
        if runtime is None:
            self.__class__ = KimiGatedDeltaNetAttention
            return
        self.kda_runtime = runtime
