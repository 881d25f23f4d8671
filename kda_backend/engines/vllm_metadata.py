"""Additions to vLLM's metadata and cache for our layers: the lengths of requests, prefill
checkpoints, and slots for drafts.

vLLM's metadata of KDA layers has the lengths on the GPU alone. Its builder has them in host memory
too, and ours leaves them with the metadata: by them a prefill chooses its path and its schedule,
and prefills that would need much scratch memory are several calls.

Checkpoints are the states inside of a prefill that the prefix cache asks a layer for. The
scheduler, the cache's manager and the metadata builders all take from a layer's cache spec where
they may lie. The scan leaves the state after whole chunks of 64 tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase

from backend_core.engines.vllm_flag import batch_invariant
from backend_core.launch.streams import is_capturing
from kda_backend.spec import CHUNK

_BOUNDS = "_kda_dsv4_query_start_loc_cpu"  # on the metadata of a step


class ExportsCheckpoints:
    """Stands before the engine's class among the bases of a layer of ours.

    Attributes:
        exports: the layer's metadata can ask for checkpoints.
    """

    exports: bool

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Upstream's, with checkpoints at whole chunks."""
        return dataclasses.replace(
            super().get_kv_cache_spec(vllm_config),  # type: ignore[misc]
            num_prefill_checkpoint_blocks=int(self.exports),
            prefill_checkpoint_alignment=CHUNK if self.exports else None,
        )

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """vLLM makes the blocks of its prefix cache multiples of it."""
        return CHUNK if self.exports else None


class NotesRows:
    """Stands in the place of vLLM's builder of checkpoints, which is given the rows of prefills.

    Attributes:
        rows: of the step's requests that draft nothing, all that have prefills among them.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.rows: list[int] = []

    def build(self, m: Any, request_rows: list[int]) -> Any:
        self.rows = request_rows
        return self._builder.build(m, request_rows)


class KeepsLengths:
    """Stands before the engine's class among the bases of a layer of ours."""

    mamba_type: Any
    recoverssm_records: Any = None  # of drafts; its name in the layer of Kimi-K3, which has its own

    def get_attn_backend(self) -> Any:
        """Upstream's backend, whose builder leaves the lengths with the metadata, and what commits
        records."""
        upstream: Any = super().get_attn_backend  # type: ignore[misc]
        if batch_invariant() and upstream.__func__ is MambaBase.get_attn_backend:
            # which raises: no backend of upstream's says that it is
            return _keeping_lengths(self.mamba_type.get_class())
        backend = _keeping_lengths(upstream())
        if self.recoverssm_records is None:
            return backend
        from kda_backend.engines.vllm_records import committing  # of releases that commit any

        return committing(self.recoverssm_records, backend)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Upstream's, with slots for the states of drafted tokens where no records are kept.

        Raises:
            ValueError: a draft may be longer than a block, whose state is made of its records.
        """
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        drafted = vllm_config.num_speculative_tokens
        if self.recoverssm_records is None:
            return dataclasses.replace(spec, num_speculative_blocks=drafted)
        if spec.mamba_cache_mode == "align" and spec.block_size <= drafted:
            raise ValueError(
                f"records of drafts of {1 + drafted} tokens need blocks of as many, got"
                f" {spec.block_size} (--mamba-block-size)"
            )
        return dataclasses.replace(spec, num_speculative_blocks=0)


@functools.cache
def _keeping_lengths(backend: Any) -> Any:
    """A subclass of ``backend``: vLLM groups layers by the class, so there is one of each."""
    upstream: Any = backend.get_builder_cls()

    class Builder(upstream):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            """Upstream asks for its exact type before it lets a cache group take over another's
            metadata; whether this one may is what one of that type says."""
            super().__init__(*args, **options)
            self.checkpoint_builder = NotesRows(vars(self)["checkpoint_builder"])
            exact = vars(upstream(*args, **options))
            for name in ("supports_update_block_table", "mamba_aligned_state_indices"):
                if name in exact:
                    setattr(self, name, exact[name])

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, *args, **options)
            bounds = common_attn_metadata.query_start_loc_cpu
            if metadata.num_spec_decodes and metadata.num_prefills:  # which lie between drafts
                lengths = bounds.diff()[self.checkpoint_builder.rows]
                bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=bounds.dtype), (1, 0))
            setattr(metadata, _BOUNDS, bounds)
            return metadata

        def update_block_table(self, metadata: Any, *args: Any, **options: Any) -> Any:
            """Metadata of another cache group, whose requests have the same lengths."""
            updated = super().update_block_table(metadata, *args, **options)
            setattr(updated, _BOUNDS, getattr(metadata, _BOUNDS))
            return updated

    class Backend(backend):  # type: ignore[misc]
        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            """A layer that is not becomes upstream's as it is built (`vllm_layer`)."""
            return True

    Backend.__qualname__ = f"KeepsLengths{backend.__name__}"
    return Backend


def prefill_bounds(metadata: Any, sequences: int, device: torch.device) -> torch.Tensor | None:
    """Token offsets of a step's prefills among its tokens that are no drafts', ``[sequences + 1]``
    in host memory.

    ``None`` in the capture of a CUDA graph, which is replayed with other lengths.
    """
    if is_capturing(device):
        return None
    bounds: torch.Tensor = getattr(metadata, _BOUNDS)
    first, offset = metadata.num_decodes, metadata.num_decode_tokens
    bounds = bounds[first : first + sequences + 1]
    return bounds - offset if offset else bounds
