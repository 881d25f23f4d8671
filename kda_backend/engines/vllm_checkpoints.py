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

    0.29 has no alignment in the spec and takes every 16th token for granted. But its scheduler lets
    a prefill that starts within a block end with that block, so that the only place it asks for is
    at whole blocks from a block's start. Where those are not whole chunks the layer has no
    checkpoints, and the scheduler ends a step's prefill where it needs a state.

    Args:
        exports: upstream's layer of this release has checkpoints, on some platform.
    """
    known = {field.name for field in dataclasses.fields(spec)}
    if _NUMBER not in known:
        return spec
    keeps = exports and (_ALIGNMENT in known or spec.block_size % CHUNK == 0)
    asked = {_NUMBER: int(keeps), _ALIGNMENT: CHUNK if keeps else None}
    return dataclasses.replace(spec, **{name: asked[name] for name in asked if name in known})
