"""DeepSeek-V4.1's compressors of ratio 1 and 2: a step's plan and call, and what calls share.

Both engines keep the rows of ratio 2 in a ring of the state per request, and the token at position
p in row p modulo the ring's length. Ratio 1 pools nothing and has no state.

vLLM names the state row of each token. sglang names its request, whose number is that of the ring.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from backend_core.contracts import (
    expect_device,
    expect_dtype,
    expect_shape,
    expect_stride,
    interprets,
)
from backend_core.operator import Selection, select
from backend_core.target import Target, detect_target
from dsv4_backend.contract.calls import check_records
from dsv4_backend.contract.values import ROW_DTYPES, check_index
from dsv4_backend.launch_params import TABLES
from dsv4_backend.selection import expect_operator
from dsv4_backend.spec import LATENT_DIM, LowRatioLayer, LowRatioSpec

if TYPE_CHECKING:
    from backend_core.launch.triton import Argument, Packed

OPERATOR = "low_ratio"
RING_ROWS = 8
"""The fewest rows of a ring of vLLM's: those of a step in one launch, and the row before them."""

LAYER = (
    *("state_ptr", "stride_state_b", "stride_state_r", "weight_ptr", "wk_ptr", "stride_wk_n"),
    *("key_weight_ptr", "table_ptr", "stride_table_p", "cache_ptr", "stride_cache_p"),
    *("index_cache_ptr", "stride_index_cache_p", "eps"),
)
"""The kernels' arguments that stay while the layer and its caches do."""
PLAN = (
    *("position_ptr", "state_slot_ptr", "request_ptr", "query_start_ptr", "slot_ptr"),
    *("index_slot_ptr", "num_requests", "num_tokens"),
)
"""The kernels' arguments that a step plan has."""


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
class LowRatioStep:
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

    @cached_property
    def packed(self) -> Packed:
        """``PLAN``, prepared once for all launches of the step."""
        from backend_core.launch.triton import pack  # the torch path needs no triton

        values: list[Argument] = [self.positions, self.state_slots, self.requests]
        values += [self.query_starts, self.slots, self.index_slots]
        values += [self.num_requests, self.num_tokens]
        return pack(values)

    def without_work(self) -> LowRatioStep:
        """This plan for launches of no programs: what it launches is compiled and loaded."""
        nothing = copy.copy(self)
        nothing.__dict__.update(packed=self.packed, num_tokens=0, num_latents=0)
        return nothing

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
class LowRatioCall:
    """A layer with the tensors of one call; ``packed`` is ``LAYER``.

    With ``score`` [T, 512] of ratio 2, ``kv_score`` [T, 512] has the other half of the rows.
    """

    layer: LowRatioLayer
    kv_score: torch.Tensor
    state: torch.Tensor | None
    cache: torch.Tensor
    index_cache: torch.Tensor
    score: torch.Tensor | None = None
    packed: Packed | None = None

    def pack(self) -> Packed:
        """``LAYER`` of this call."""
        from backend_core.launch.triton import pack

        layer, state = self.layer, self.state
        strides = (None, None) if state is None else state.stride()[:2]
        values: tuple[Argument, ...] = (
            *(state, *strides, layer.norm_weight),
            *(layer.key_projection, layer.key_projection.stride()[0], layer.key_norm_weight),
            *(layer.rope_table, layer.rope_table.stride()[0], self.cache, self.cache.stride()[0]),
            *(self.index_cache, self.index_cache.stride()[0], layer.spec.eps),
        )
        return pack(values)


class LowRatioRun(Protocol):
    """One kernel path, bound to a kind of compressor and the rows of its rings."""

    def __call__(self, call: LowRatioCall, plan: LowRatioStep, /) -> None: ...


@dataclass(frozen=True)
class LowRatioStepSpec:
    """What the paths are bound to; ``state_block``: rows of a ring, 1 where there is none."""

    compressor: LowRatioSpec
    state_block: int


@dataclass(frozen=True, eq=False)
class LowRatioBound:
    """What calls that agree share; ``packed`` as in `dsv4_backend.step.Bound`."""

    selection: Selection[LowRatioStepSpec, LowRatioRun]
    packed: Packed | None


def low_ratio_selection(
    target: Target, spec: LowRatioSpec, state_block: int = RING_ROWS
) -> Selection[LowRatioStepSpec, LowRatioRun]:
    """The operator's paths for a kind of compressor, by tokens and the longest chunk.

    Raises:
        LookupError: there is no table for the target.
    """
    return select(TABLES, OPERATOR, target, LowRatioStepSpec(spec, state_block))


def bind(
    layer: LowRatioLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor | None,
    cache: torch.Tensor,
    index_cache: torch.Tensor,
    score: torch.Tensor | None,
    weights: tuple[int, ...],
    plan_device: torch.device,
    target: Target | None,
    selection: Selection[LowRatioStepSpec, LowRatioRun] | None,
) -> LowRatioBound:
    """Check a call, and select and bind its paths; ``weights``: the addresses of the layer's."""
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
    check_records("cache", spec.main, cache)
    check_records("index_cache", spec.index, index_cache)
    for name, tensor in (("kv_score", kv_score), ("cache", cache), ("index_cache", index_cache)):
        expect_device(name, tensor, device)
    if plan_device != device:
        raise ValueError(f"step_plan must be on {device} (as the layer is), got {plan_device}")
    bound = LowRatioStepSpec(spec, 1 if state is None else state.shape[1])
    if selection is None:
        selection = select(TABLES, OPERATOR, target or detect_target(plan_device), bound)
    else:
        selection = expect_operator(selection, OPERATOR).for_spec(bound)
    selection.expect_device("kv_score", kv_score)
    call = LowRatioCall(layer, kv_score, state, cache, index_cache, score)
    return LowRatioBound(
        selection, call.pack() if selection.has_kernels and not interprets() else None
    )


def bound_low_ratio(
    call: LowRatioCall,
    plan: LowRatioStep,
    target: Target | None,
    selection: Selection[Any, Any] | None,
    bind: Callable[..., LowRatioBound],
) -> Selection[LowRatioStepSpec, LowRatioRun]:
    """Check a call or find that one like it was, make it ready, and return its paths.

    Args:
        bind: `bind`, or what keeps its results for calls that agree.
    """
    layer = call.layer
    tensors = (layer.norm_weight, layer.key_projection, layer.key_norm_weight, layer.rope_table)
    bound = bind(
        layer,
        call.kv_score,
        call.state,
        call.cache,
        call.index_cache,
        call.score,
        tuple(tensor.data_ptr() for tensor in tensors),
        plan.device,
        target,
        selection,
    )
    for name, rows in (("kv_score", call.kv_score), ("score", call.score)):
        if rows is not None and rows.shape[0] < plan.num_tokens:
            raise ValueError(
                f"{name} must have at least {plan.num_tokens} rows (tokens of the step plan), "
                f"got {rows.shape[0]}"
            )
    if (plan.state_slots is None) != (call.state is None):
        must = "None" if call.state is None else "given"
        raise ValueError(f"state_slots must be {must} for ratio {layer.spec.compress_ratio}")
    # the interpreter reads tensors, which nothing may keep
    call.packed = bound.packed or (call.pack() if interprets() else None)
    return bound.selection
