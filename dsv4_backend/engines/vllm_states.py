"""vLLM's metadata of compressor states, with the requests' bounds and room for a step's plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import CUDAGraphMode


def with_plans(
    cache: type[Any],
    backend: type[Any],
    builder: type[Any],
    extend: Callable[[Any, Any, Any], None] = lambda builder, metadata, common: None,
) -> type[Any]:
    """A state cache of vLLM's whose metadata keep the plans of their step.

    Args:
        cache, backend, builder: the classes of a DeepSeek release in vLLM, of which the first names
            the second and that the third.
        extend: called with the builder, what it has built and vLLM's common metadata.
    """

    class Builder(builder):  # type: ignore[misc]
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.query_start_loc = common_attn_metadata.query_start_loc
            metadata.max_query_len = common_attn_metadata.max_query_len
            metadata.plans = {}
            metadata.replays_decodes_alone = False
            extend(self, metadata, common_attn_metadata)
            return metadata

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            """For a FULL graph: of decodes, unless batches with prefills are captured so too."""
            metadata = super().build_for_cudagraph_capture(common_attn_metadata)
            mode = self.vllm_config.compilation_config.cudagraph_mode
            metadata.replays_decodes_alone = mode.mixed_mode() is not CUDAGraphMode.FULL
            return metadata

    class Backend(backend):  # type: ignore[misc]
        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

    class StateCache(cache):  # type: ignore[misc]
        def get_attn_backend(self) -> type[Backend]:
            return Backend

    return StateCache
