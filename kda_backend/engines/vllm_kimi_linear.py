"""Kimi-Linear's KDA layer, which AliceAI builds too. Upstream's ``forward`` stays.

From 0.32 on its metadata can ask for states inside of prefills, which upstream's layer does not
export: there the scheduler ends a step at the last block of a prompt, and runs the tokens after it
in a step of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from kda_backend.engines.vllm_checkpoints import ExportsCheckpoints
from kda_backend.engines.vllm_layer import runtime_of
from kda_backend.engines.vllm_packed import PackedCore


def layer_class(upstream: Any) -> Any:
    """Our class in the place of ``upstream``, ``KimiGatedDeltaNetAttention``."""

    class KdaLayer(PackedCore, ExportsCheckpoints, upstream):  # type: ignore[misc]
        def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(config, vllm_config, prefix)
            runtime = runtime_of(vllm_config, self, self.gate_lower_bound, checkpoints=self.exports)
            if runtime is None:
                self.__class__ = upstream
                return
            self.kda_runtime = runtime

        @property
        def exports(self) -> bool:
            fields = dataclasses.fields(GDNAttentionMetadata)
            return "checkpoint" in {field.name for field in fields}

    return KdaLayer
