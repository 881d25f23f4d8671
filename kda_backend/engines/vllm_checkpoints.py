"""Prefill checkpoints: the states inside of a prefill that vLLM's prefix cache asks a layer for.

The scheduler, the cache's manager and the metadata builders all take from a layer's cache spec
where they may lie. The scan leaves the state after whole chunks of 64 tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kda_backend.spec import CHUNK

_NUMBER, _ALIGNMENT = "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"


class ExportsCheckpoints:
    """Stands before the engine's class among the bases of a layer of ours."""

    @property
    def exports(self) -> bool:
        """Whether this layer's metadata can ask for checkpoints."""
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Upstream's, with checkpoints at whole chunks."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        return checkpointing_spec(spec, exports=self.exports)

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """vLLM 0.33 makes the blocks of its prefix cache multiples of it."""
        return CHUNK if self.exports else None


def checkpointing_spec(spec: Any, *, exports: bool) -> Any:
    """``spec``, vLLM's ``MambaSpec`` of a layer, with the checkpoints that our layer exports.

    Releases without an alignment in the spec (0.29 and older) take every 16th token for granted:
    there the layer has none, and the scheduler ends a step's prefill where it needs a state.

    Args:
        exports: upstream's layer of this release has checkpoints, on some platform.
    """
    known = {field.name for field in dataclasses.fields(spec)}
    if _NUMBER not in known:
        return spec
    if exports and _ALIGNMENT in known:
        return dataclasses.replace(spec, **{_NUMBER: 1, _ALIGNMENT: CHUNK})
    none = {_NUMBER: 0, _ALIGNMENT: None}
    return dataclasses.replace(spec, **{name: none[name] for name in none if name in known})
