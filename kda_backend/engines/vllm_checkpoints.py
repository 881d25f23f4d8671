"""Prefill checkpoints: the states inside of a prefill that vLLM's prefix cache asks a layer for.

The scheduler, the cache's manager and the metadata builders all take from a layer's cache spec
where they may lie. The scan leaves the state after whole chunks of 64 tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kda_backend.spec import CHUNK


class ExportsCheckpoints:
    """Stands before the engine's class among the bases of a layer of ours."""

    @property
    def exports(self) -> bool:
        """Whether this layer's metadata can ask for checkpoints."""
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Upstream's, with checkpoints at whole chunks."""
        return dataclasses.replace(
            super().get_kv_cache_spec(vllm_config),  # type: ignore[misc]
            num_prefill_checkpoint_blocks=int(self.exports),
            prefill_checkpoint_alignment=CHUNK if self.exports else None,
        )

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """vLLM 0.33 makes the blocks of its prefix cache multiples of it."""
        return CHUNK if self.exports else None
