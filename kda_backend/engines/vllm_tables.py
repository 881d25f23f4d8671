"""The tables from which KDA layers run inside of vLLM's CUDA graphs.

Upstream a graph of a step with prefills breaks at every KDA layer, whose launches depend on the
step's requests. Here the layer is captured with the launches of any batch: they read the number
of requests, their lengths, slots and checkpoints from tables, which are filled before a replay.

A step's first tokens are of requests that decode, as many as there are; vLLM counts a prompt's
first token with the prefills. A captured decode step takes as many tokens as its table has rows,
and what it wrote for a request is what counts; the prefills begin after the last of them.

The tables have room for so many prefills as make `TASKS` of the scan, and for as many decodes; a
step with more of them, or with drafts to verify, replays the graph that breaks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from backend_core.launch.streams import is_capturing
from kda_backend.engines.vllm_run import Runtime
from kda_backend.engines.vllm_step import StepPart
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.step_plan import StepPlan, build_step_plan

TASKS = 1024
"""Requests of a table times value heads."""

_TABLES = "_kda_dsv4_tables"  # on vLLM's ForwardContext, where the pass runs on tables


@dataclass(frozen=True)
class CacheGroup:
    """The tables of the layers that share slots.

    Attributes:
        prefix: of the first of them, by which the step's metadata has what they read.
        slots, decodes: ``[rows]`` int32, of the prefills and of the decodes, -1 where no request
            is; checkpoints: as many, where layers may be asked for any.
    """

    prefix: str
    slots: torch.Tensor
    decodes: torch.Tensor
    checkpoints: Checkpoints | None


class StepTables:
    """One model's; filled on the stream of its steps.

    Attributes:
        rows: the most prefills of a step, and the most decodes.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        heads = runtime.selection.shape.num_value_heads
        self.rows = max(1, min(runtime.max_sequences, TASKS // heads))
        self._checkpoints = runtime.checkpoints
        self._chunk_table = runtime.selection.target.vendor != "cpu"
        self._cu_seqlens = torch.zeros(self.rows + 1, dtype=torch.int32, device=device)
        self._has_initial = torch.zeros(self.rows, dtype=torch.bool, device=device)
        self._is_decode = torch.zeros(self.rows, 1, 1, dtype=torch.bool, device=device)
        self._groups: list[CacheGroup] = []

    def clear(self) -> None:
        """No request: what a warm-up reads and writes is nobody's."""
        self._cu_seqlens.zero_()
        self._is_decode.zero_()
        for group in self._groups:
            group.slots.fill_(-1)
            group.decodes.fill_(-1)
            _fill_checkpoints(group, None, 0, 0)

    def fill(self, attn_metadata: Any) -> bool:
        """Take over a step without reading it on the host; false where it does not fit.

        Args:
            attn_metadata: of the forward context, by the prefixes of layers.
        """
        if not isinstance(attn_metadata, dict) or not self._groups:
            return False
        found: list[Any] = [attn_metadata.get(group.prefix) for group in self._groups]
        m = found[0]
        if None in found or not m.num_prefills or m.num_spec_decodes:
            return False
        first, number = m.num_decodes, m.num_prefills
        if max(first, number) > self.rows:
            return False
        self._cu_seqlens[: number + 1].copy_(m.non_spec_query_start_loc[first : first + number + 1])
        self._cu_seqlens[number + 1 :].fill_(m.num_decode_tokens + m.num_prefill_tokens)
        self._has_initial[:number].copy_(m.has_initial_state[first : first + number])
        self._is_decode[:first].fill_(True)
        self._is_decode[first:].fill_(False)
        for group, metadata in zip(self._groups, found, strict=True):
            slots = metadata.non_spec_state_indices_tensor
            for table, rows in (
                (group.decodes, slots[:first]),
                (group.slots, slots[first : first + number]),
            ):
                table[: len(rows)].copy_(rows)
                table[len(rows) :].fill_(-1)
            _fill_checkpoints(group, metadata, first, number)
        return True

    def rows_of(
        self, prefix: str, attn_metadata: Any, tokens: int, plans: dict[Any, StepPlan]
    ) -> tuple[torch.Tensor, StepPart, StepPart]:
        """Rows that the layer of ``prefix`` runs in a pass of so many tokens, with padding:
        which of the first tokens decode, the rows of decodes, and the prefills.

        Args:
            plans: of this pass. A capture makes its own, whose kernels the graph then launches.
        """
        rows = min(self.rows, tokens)
        cu_seqlens = self._cu_seqlens[: rows + 1]
        key = ("tables", tokens, is_capturing(cu_seqlens.device))
        if key not in plans:
            plans[key] = build_step_plan(
                cu_seqlens, tokens, chunk_table=self._chunk_table, any_batch=True
            )
        group = self._group(prefix, attn_metadata)
        checkpoints = group.checkpoints
        if checkpoints is not None:
            checkpoints = Checkpoints(*(table[:rows] for table in checkpoints))
        prefills = StepPart(
            *(0, tokens, group.slots[:rows], self._has_initial[:rows], plans[key]), checkpoints
        )
        decodes = StepPart(0, rows, group.decodes[:rows], None, None)
        return self._is_decode[:rows], decodes, prefills

    def _group(self, prefix: str, attn_metadata: Any) -> CacheGroup:
        """The layer's, made at its first capture: layers that share slots share metadata."""
        for group in self._groups:
            if attn_metadata[group.prefix] is attn_metadata[prefix]:
                return group

        def table(*shape: int, value: int) -> torch.Tensor:
            return torch.full(
                (self.rows, *shape), value, dtype=torch.int32, device=self._cu_seqlens.device
            )

        checkpoints = None
        if self._checkpoints:
            checkpoints = Checkpoints(table(value=0), table(1, value=-1), table(1, value=-1))
        group = CacheGroup(prefix, table(value=-1), table(value=-1), checkpoints)
        self._groups.append(group)
        return group


def _fill_checkpoints(group: CacheGroup, metadata: Any, first: int, number: int) -> None:
    """Copy the checkpoints of ``number`` prefills; in metadata of some releases their rows follow
    the ``first`` of requests that decode."""
    if group.checkpoints is None:
        return
    group.checkpoints.chunks.fill_(-1)
    group.checkpoints.state_indices.fill_(-1)
    asked = None if metadata is None else metadata.checkpoint
    if asked is None:
        return
    offsets, slots = asked.checkpoint_offsets, asked.state_indices
    if offsets.shape[0] >= first + number:
        offsets, slots = offsets[first:], slots[first:]
    given = Checkpoints.of(offsets[:number], slots[:number], NULL_BLOCK_ID)
    for table, values in zip(group.checkpoints, given, strict=True):
        table[: len(values)].copy_(values)


def run_on(tables: StepTables) -> None:
    """Let the layers of the current forward pass run on ``tables``."""
    setattr(get_forward_context(), _TABLES, tables)


def tables_of_pass() -> StepTables | None:
    """Tables on which the layers of the current forward pass run."""
    if not is_forward_context_available():
        return None
    return getattr(get_forward_context(), _TABLES, None)


def breaks_without_tables(core: Callable[..., None]) -> Callable[..., None]:
    """``eager_break_during_capture`` of a layer's core, which is captured where it runs on
    tables."""
    breaks = eager_break_during_capture(core)

    @functools.wraps(core)
    def call(*args: Any, **kwargs: Any) -> None:
        (breaks if tables_of_pass() is None else core)(*args, **kwargs)

    return call
