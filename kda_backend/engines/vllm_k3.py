"""Kimi-K3's KDA layer, of vLLM 0.27 (NVIDIA) or 0.28 (AMD) to 0.33.

Its output gate has full rank, its forget gate a lower bound, and its prefills export states that
the prefix cache keeps. Upstream's ``forward`` stays.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from kda_backend.engines.vllm_checkpoints import checkpointing_spec
from kda_backend.engines.vllm_layer import runtime_of
from kda_backend.engines.vllm_packed import PackedCore


def layer_class(upstream: Any) -> Any:
    """Our class in the place of ``upstream``, the platform's own ``KimiK3DeltaAttention``."""
    exports = "get_kv_cache_spec" in vars(upstream)

    class KdaLayer(PackedCore, upstream):  # type: ignore[misc]
        def __init__(
            self, config: Any, vllm_config: VllmConfig, prefix: str = "", **options: Any
        ) -> None:
            """``options`` are those of upstream's class on this platform and in this release."""
            super().__init__(config, vllm_config, prefix, **options)
            runtime = runtime_of(
                vllm_config,
                self,
                self.gate_lower_bound,
                checkpoints=exports and self._has_checkpoints(),
            )
            if runtime is None:
                self.__class__ = upstream
                return
            self.kda_runtime = runtime

        def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
            """Upstream's, with checkpoints at whole chunks."""
            spec = super().get_kv_cache_spec(vllm_config)
            return checkpointing_spec(spec, exports=exports and self._has_checkpoints())

        def _has_checkpoints(self) -> bool:
            """Whether the user leaves them on; AMD's layer has an option against them."""
            return bool(getattr(self, "use_prefill_checkpoint", True))

    return KdaLayer
