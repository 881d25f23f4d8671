"""The KDA layer of Kimi-Linear in vLLM 0.27 to 0.33. To be removed when vLLM's changes again.

From 0.32 on its metadata can ask for states inside of prefills, which upstream's layer does not
export: there the scheduler ends a step at the last block of a prompt, and runs the tokens after it
in a step of their own.
"""

from __future__ import annotations

import dataclasses

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from kda_backend.engines.vllm_checkpoints import ExportsCheckpoints
from kda_backend.engines.vllm_layer import runtime_of
from kda_backend.engines.vllm_packed import PackedCore


class KdaLayer(PackedCore, ExportsCheckpoints, KimiGatedDeltaNetAttention):  # type: ignore[misc]
    def __init__(self, config: KimiLinearConfig, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        runtime = runtime_of(vllm_config, self, self.gate_lower_bound, checkpoints=self.exports)
        if runtime is None:
            self.__class__ = KimiGatedDeltaNetAttention
            return
        self.kda_runtime = runtime

    @property
    def exports(self) -> bool:
        return "checkpoint" in {field.name for field in dataclasses.fields(GDNAttentionMetadata)}
