"""The lengths of a step's requests, as the host knows them.

vLLM's metadata of KDA layers has them on the GPU alone. Its builder has them in host memory too,
and ours leaves them with the metadata: by them a prefill chooses its path and its schedule.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from backend_core.launch.streams import is_capturing

_BOUNDS = "_kda_dsv4_query_start_loc_cpu"  # on the metadata of a step


class KeepsLengths:
    """Stands before the engine's class among the bases of a layer of ours."""

    def get_attn_backend(self) -> Any:
        """Upstream's backend, whose builder leaves the lengths with the metadata."""
        return _keeping_lengths(super().get_attn_backend())  # type: ignore[misc]


@functools.cache
def _keeping_lengths(backend: Any) -> Any:
    """A subclass of ``backend``: vLLM groups layers by the class, so there is one of each."""
    upstream: Any = backend.get_builder_cls()

    class Builder(upstream):  # type: ignore[misc]
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, *args, **options)
            setattr(metadata, _BOUNDS, common_attn_metadata.query_start_loc_cpu)
            return metadata

        def update_block_table(self, metadata: Any, *args: Any, **options: Any) -> Any:
            """Of another cache group, whose requests have the same lengths."""
            updated = super().update_block_table(metadata, *args, **options)
            setattr(updated, _BOUNDS, getattr(metadata, _BOUNDS))
            return updated

    class Backend(backend):  # type: ignore[misc]
        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

    Backend.__qualname__ = f"KeepsLengths{backend.__name__}"
    return Backend


def prefill_bounds(metadata: Any, sequences: int, device: torch.device) -> torch.Tensor | None:
    """Token offsets of a step's prefills, ``[sequences + 1]`` in host memory.

    ``None`` beside drafts, whose requests lie between others, and in the capture of a CUDA graph,
    which is replayed with other lengths.
    """
    if metadata.num_spec_decodes or is_capturing(device):
        return None
    bounds: torch.Tensor = getattr(metadata, _BOUNDS)
    first = metadata.num_decodes
    offset: int = metadata.num_decode_tokens
    return bounds[first : first + sequences + 1].sub(offset)
