"""Kimi-K3's KDA layer.

Its output gate has full rank, its forget gate a lower bound, and its prefills export states that
the prefix cache keeps. Upstream's ``forward`` stays.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from kda_backend.engines.vllm_checkpoints import ExportsCheckpoints
from kda_backend.engines.vllm_layer import runtime_of
from kda_backend.engines.vllm_packed import PackedCore


def layer_class(upstream: Any) -> Any:
    """Our class in the place of ``upstream``, the platform's own ``KimiK3DeltaAttention``."""
    has_checkpoints = "get_kv_cache_spec" in vars(upstream)

    class KdaLayer(PackedCore, ExportsCheckpoints, upstream):  # type: ignore[misc]
        def __init__(
            self, config: Any, vllm_config: VllmConfig, prefix: str = "", **options: Any
        ) -> None:
            """``options`` are those of upstream's class on this platform and in this release."""
            super().__init__(config, vllm_config, prefix, **options)
            runtime = runtime_of(vllm_config, self, self.gate_lower_bound, checkpoints=self.exports)
            if runtime is None:
                self.__class__ = upstream
                return
            self.kda_runtime = runtime

        @property
        def exports(self) -> bool:
            """AMD's layer has an option against it."""
            return has_checkpoints and bool(getattr(self, "use_prefill_checkpoint", True))

    return KdaLayer
