"""DeepSeek-V4.1's compressors of ratio 1 and 2: a step's plan and call, and what calls share.

Both engines keep the rows of ratio 2 in a ring of the state per request, and the token at position
p in row p modulo the ring's length. Ratio 1 pools nothing and has no state.

vLLM names the state row of each token. sglang names its request, whose number is that of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from backend_core.operator import Selection, select
from backend_core.ready import Prepared
from backend_core.target import Target, detect_target
from dsv4_backend.contract.calls import check_layer, check_records
from dsv4_backend.contract.values import ROW_DTYPES, check_index
from dsv4_backend.launch_params import TABLES
from dsv4_backend.selection import expect_operator
from dsv4_backend.spec import LATENT_DIM, V41Layer, V41Spec
from dsv4_backend.step import CompressorPath, Look, expect_rows

if TYPE_CHECKING:
    from backend_core.launch.triton import Argument

OPERATOR = "v41"
RING_ROWS = 8
"""The fewest rows of a ring of vLLM's: those of a step in one launch, and the row before them."""


class GroupEnd(NamedTuple):
    """A token that ends a group, as the host reads it from a step plan.

    Attributes:
        token: its input row.
        position: of the token in its sequence.
        before: state row of the token before it; -1 where that is input row ``token - 1``, or
            where there is none.
        slots: of the main record and of the indexer's; < 0 stores nothing.
    """

    token: int
    position: int
    before: int
    slots: tuple[int, int]


@dataclass(frozen=True, eq=False)
class V41Step:
    """Tokens of several requests, one request after another: prompts, decodes, drafts.

    Attributes:
        positions: [T] int32 or int64, of the tokens in their sequences.
        slots, index_slots: [T] int32 or int64, where the main record and the indexer's key of a
            group that ends with the token go; < 0 stores nothing. Of ratio 2 those of tokens at
            even positions are not read.
        state_slots: [T] int32 or int64, ring times its rows plus position modulo rows; < 0 is
            padding. With ``requests`` it only says which tokens are padding, those with 0 or less:
            sglang has the slots of its uncompressed cache. ``None`` of ratio 1.
        query_starts: [B + 1] int32 or int64, first token of each request in this call; requests
            without tokens may follow. With ``requests`` [B], in any order and of more tokens than
            these if need be, or ``None``: any token may be the first. ``None`` of ratio 1.
        longest: tokens of the longest chunk, or a larger number; ``None`` if the host does not know
            it. Of ratio 2 a step in one launch needs it to be less than the rows of a ring.
        requests: [T] int32 or int64, the ring of each token's request; of padding too one of them.
            ``None`` of ratio 1, and where ``state_slots`` are rows of the state.

    Raises:
        ValueError: a tensor does not have the shape or dtype above.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    index_slots: torch.Tensor
    state_slots: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None
    longest: int | None = None
    requests: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_index("positions", self.positions, ("T",))
        tokens, device = self.num_tokens, self.device
        check_index("slots", self.slots, (tokens,), device)
        check_index("index_slots", self.index_slots, (tokens,), device)
        if self.requests is None and (self.state_slots is None) != (self.query_starts is None):
            raise ValueError("state_slots and query_starts must both be given, or neither")
        if self.requests is not None and self.state_slots is None:
            raise ValueError("state_slots must be given with requests")
        for name in ("state_slots", "requests"):
            if (tensor := getattr(self, name)) is not None:
                check_index(name, tensor, (tokens,), device)
        if self.query_starts is not None:
            size = "B + 1" if self.requests is None else "B"
            check_index("query_starts", self.query_starts, (size,), device)

    @cached_property
    def num_tokens(self) -> int:
        """Input rows that a call must have."""
        return self.positions.shape[0]

    @cached_property
    def num_requests(self) -> int:
        """Tokens of ratio 2 that may begin a chunk; 0 of ratio 1, where nothing depends on it."""
        if self.query_starts is None:
            return 0 if self.requests is None else self.num_tokens
        return self.query_starts.shape[0] - (self.requests is None)

    @cached_property
    def num_latents(self) -> int:
        """The most groups that may end in the step, in the order of the kernel that makes them."""
        if self.state_slots is None:
            return self.num_tokens
        return self.num_requests + -(-self.num_tokens // 2)

    @cached_property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def layout(self) -> tuple[object, ...]:
        """All that a check may look at."""
        return type(self), self.device, self.state_slots is None

    @cached_property
    def prepared(self) -> Prepared:
        """The launches of the step's calls, by the layout of their tensors."""
        return Prepared()

    def kernel_arguments(self) -> dict[str, Argument]:
        """The kernels' arguments by name that a step plan has."""
        return {
            "position_ptr": self.positions,
            "state_slot_ptr": self.state_slots,
            "request_ptr": self.requests,
            "query_start_ptr": self.query_starts,
            "slot_ptr": self.slots,
            "index_slot_ptr": self.index_slots,
            "num_requests": self.num_requests,
            "num_tokens": self.num_tokens,
        }

    def state_rows(self, ring_rows: int) -> torch.Tensor:
        """The state row of each token, < 0 of padding, [T] int64; empty of ratio 1."""
        if self.state_slots is None:
            return self.positions.new_empty(0)
        rows = self.state_slots.long()
        if self.requests is not None:
            found = self.requests.long() * ring_rows + self.positions % ring_rows
            rows = torch.where(rows > 0, found, -1)
        return rows

    def group_ends(self, ring_rows: int) -> Iterator[GroupEnd]:
        """The tokens that end a group, read on the host.

        Args:
            ring_rows: rows of a ring of the state.
        """
        slots = list(zip(self.slots.tolist(), self.index_slots.tolist(), strict=True))
        states = self.state_rows(ring_rows).tolist()
        for token, position in enumerate(self.positions.tolist()):
            if not states:
                yield GroupEnd(token, position, -1, slots[token])
            elif states[token] >= 0 and position % 2 == 1:
                first = states[token] // ring_rows * ring_rows
                before = first + (position - 1) % ring_rows
                if token and states[token - 1] == before:
                    before = -1
                yield GroupEnd(token, position, before, slots[token])

    def state_writes(self, ring_rows: int) -> Iterator[tuple[int, int]]:
        """(token, state row) of each row that the step writes and no later token writes over."""
        states = self.state_rows(ring_rows).tolist()
        for token, row in enumerate(states):
            if row >= 0 and row not in states[token + ring_rows : token + ring_rows + 1]:
                yield token, row


@dataclass(slots=True, eq=False)
class V41Call:
    """A layer with the tensors of one call.

    With ``score`` [T, 512] of ratio 2, ``kv_score`` [T, 512] has the other half of the rows.
    """

    layer: V41Layer
    kv_score: torch.Tensor
    state: torch.Tensor | None
    cache: torch.Tensor
    index_cache: torch.Tensor
    score: torch.Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        layer = self.layer
        return {
            "input_ptr": self.kv_score,
            "score_ptr": self.score,
            "state_ptr": self.state,
            "weight_ptr": layer.norm_weight,
            "wk_ptr": layer.key_projection,
            "key_weight_ptr": layer.key_norm_weight,
            "table_ptr": layer.rope_table,
            "cache_ptr": self.cache,
            "index_cache_ptr": self.index_cache,
            "eps": layer.spec.eps,
        }

    def look(self) -> Look:
        layer, x, cache, index = self.layer, self.kv_score, self.cache, self.index_cache
        state, at_state, of_state = self.state, 0, None
        score, at_score, of_score = self.score, 0, None
        if state is not None:
            at_state = state.data_ptr()
            of_state = state.shape, state.stride(), state.dtype, state.get_device()
        if score is not None:
            at_score = score.data_ptr()
            of_score = score.shape[1:], score.stride(), score.dtype, score.get_device()
        at = (
            *(x.data_ptr(), at_score, at_state, layer.norm_weight.data_ptr()),
            *(layer.key_projection.data_ptr(), layer.key_norm_weight.data_ptr()),
            *(layer.rope_table.data_ptr(), cache.data_ptr(), index.data_ptr()),
        )
        layout = (
            *(layer.layout, x.shape[1:], x.stride(), x.dtype, x.get_device() + 1 or x.device),
            *(cache.shape, cache.stride(), cache.dtype, cache.get_device() + 1 or cache.device),
            *(index.shape, index.stride(), index.dtype, index.get_device() + 1 or index.device),
            *(of_state, of_score),
        )
        joined = at[0] | at_score | at_state | at[3] | at[4] | at[5] | at[6] | at[7] | at[8]
        return at, joined, layout

    def expect_rows(self, plan: V41Step) -> None:
        expect_rows("kv_score", self.kv_score, plan.num_tokens)
        if self.score is not None:
            expect_rows("score", self.score, plan.num_tokens)

    def paths(
        self,
        plan: V41Step,
        target: Target | None,
        selection: Selection[V41StepSpec, CompressorPath] | None,
    ) -> Selection[V41StepSpec, CompressorPath]:
        check_layer(self.layer, V41Layer)
        self._check(plan)
        rows = 1 if self.state is None else self.state.shape[1]
        spec = V41StepSpec(self.layer.spec, rows)
        if selection is None:
            return select(TABLES, OPERATOR, target or detect_target(plan.device), spec)
        return expect_operator(selection, OPERATOR).for_spec(spec)

    def _check(self, plan: V41Step) -> None:
        layer, kv_score, state, score = self.layer, self.kv_score, self.state, self.score
        spec, device = layer.spec, layer.key_projection.device
        expect_shape("kv_score", kv_score, ("T", spec.row_width if score is None else LATENT_DIM))
        expect_dtype("kv_score", kv_score, *(ROW_DTYPES if state is None else (torch.float32,)))
        expect_stride("kv_score", kv_score, 1, 1)
        if (state is None) != (spec.compress_ratio == 1):
            must = "None" if spec.compress_ratio == 1 else "a tensor"
            raise ValueError(f"state must be {must} for ratio {spec.compress_ratio}, got {state!r}")
        if state is not None:
            expect_shape("state", state, ("rings", "rows", spec.row_width))
            expect_dtype("state", state, torch.float32)
            expect_stride("state", state, 2, 1)
            expect_device("state", state, device)
            if state.shape[1] < 2:
                raise ValueError(f"state must have rings of at least 2 rows, got {state.shape[1]}")
        if score is not None:
            if state is None:
                raise ValueError("score must be None for ratio 1")
            expect_shape("score", score, ("T", LATENT_DIM))
            expect_dtype("score", score, torch.float32)
            if score.stride() != kv_score.stride():
                raise ValueError(
                    f"score must have the strides of kv_score, {kv_score.stride()}, "
                    f"got {score.stride()}"
                )
            expect_device("score", score, device)
        check_records("cache", spec.main, self.cache)
        check_records("index_cache", spec.index, self.index_cache)
        caches = ("cache", self.cache), ("index_cache", self.index_cache)
        for name, tensor in (("kv_score", kv_score), *caches):
            expect_device(name, tensor, device)
        if plan.device != device:
            raise ValueError(f"step_plan must be on {device} (as the layer is), got {plan.device}")
        if (plan.state_slots is None) != (state is None):
            must = "None" if state is None else "given"
            raise ValueError(f"state_slots must be {must} for ratio {spec.compress_ratio}")


@dataclass(frozen=True)
class V41StepSpec:
    """A kind of compressor and state; ``state_block``: rows of a ring, 1 where there is none."""

    compressor: V41Spec
    state_block: int


def v41_selection(target: Target, spec: V41Spec) -> Selection[V41StepSpec, CompressorPath]:
    """The operator's paths for a kind of compressor, by tokens and the longest chunk.

    Raises:
        LookupError: there is no table for the target.
    """
    return select(TABLES, OPERATOR, target, V41StepSpec(spec, RING_ROWS))
