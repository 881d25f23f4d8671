"""Random calls of the operators on sequences, against float64; `kda_steps` has those of a step.

Layers come from a short list, since each is a compilation of its own; everything else is drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from backend_core.target import Target
from backend_core.testing.numerics import poisoned
from kda_backend import kda_prefill, kda_recurrent, reference
from kda_backend.contract.values import StateRef
from kda_backend.operators import SequencesResult
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection, KdaShape, select
from kda_backend.step_plan import StepPlan, build_step_plan
from kda_backend.testing.cases import Case, cu_tensor, make_case, offsets_of
from kda_backend.testing.regimes import REGIMES
from kda_backend.testing.tolerances import ONE_HEAD, STEP_TOLERANCES, TOLERANCES
from tools.fuzz.batches import Draw, FuzzBatch, FuzzCase, expect_untouched, worst
from tools.fuzz.kda_snapshots import Snapshots

EDGES = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129)
LONGEST = 200
_WHOLE_HEAD = 2.0
"""Factor of the tolerances for one head over a batch, which may be of a few tokens."""
_SHORT = 8
"""Sequences up to so many tokens are compared with the recurrence itself."""
_REFLECTIONS = 4.0
"""Factor where steps of nearly 2 meet keys that are nearly parallel: every token mirrors the state
at nearly one plane, which takes nothing off it, so roundings add up over the sequence."""
_UNTOUCHED = 12345.0


@dataclass(frozen=True)
class Layer:
    """A layer, and the dtypes and layouts of an engine that serves it.

    Attributes:
        model: arguments of `make_case` or `make_step` beside these: two heads of 128.
        tracks: states inside of the sequences are asked for.
        layout: of windows, as `StepPools` takes it.
    """

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    state_dtype: torch.dtype = torch.float32
    offsets_dtype: torch.dtype = torch.int32
    tracks: bool = False
    layout: str = "SD"

    @property
    def arguments(self) -> dict[str, Any]:
        return {"heads": 2, "value_heads": 2, "key_dim": 128, "value_dim": 128} | self.model


LAYERS = (
    Layer("Kimi-Linear"),
    Layer("Kimi-Linear with states of chunks", tracks=True),
    Layer("bounded gate, grouped heads", {"gate": "bounded", "heads": 1}),
    Layer(
        "bounded gate, bf16 state",
        {"gate": "bounded", "heads": 4, "value_heads": 4},
        state_dtype=torch.bfloat16,
        offsets_dtype=torch.int64,
    ),
    Layer("fp16 state", {"heads": 1, "value_heads": 1}, state_dtype=torch.float16, tracks=True),
    Layer("decays given", {"gate": "log", "beta": "given", "l2norm": False}),
    Layer("negative eigenvalues", {"beta": "twice_sigmoid"}),
    Layer("fp16", {"dtype": torch.float16}),
    Layer(
        "fp32, K 48, V 24",
        {"key_dim": 48, "value_dim": 24, "dtype": torch.float32, "heads": 1},
    ),
)


def drawn_selection(draw: Draw, target: Target, shape: KdaShape, operator: str) -> KdaSelection:
    """A selection with one of the paths that the table has for an operator."""
    selection = select(target, shape)
    paths = {f"{path.name} to {path.max_grid}": path for path in getattr(selection, operator).rows}
    return selection.with_path(paths[draw.choice("path", tuple(paths))])


def drawn_regimes(draw: Draw, heads: int) -> tuple[str, ...]:
    """A regime of each head. ``long`` has the statistics of Kimi-Linear's released checkpoint:
    exp(A_log) of 8 on average, and 201 at most."""
    return tuple(draw.choice(f"regime {h}", REGIMES) for h in range(heads))


def sequences_case(operator: str) -> FuzzCase:
    """``chunk_kda`` or ``fused_recurrent_kda``."""
    return lambda draw, target, device: _Sequences(operator, draw, target, device).batch()


class _Sequences:
    """One call on packed sequences."""

    def __init__(self, operator: str, draw: Draw, target: Target, device: torch.device) -> None:
        self.is_prefill, self.device = operator == "prefill", device
        self.operator, self.target = operator, target
        self.layer = draw.choice("layer", LAYERS)
        self.regimes = drawn_regimes(draw, self.layer.arguments["value_heads"])
        longest = LONGEST if self.is_prefill else 5
        count = draw.integer("sequences", 1, 6)
        edges = EDGES if self.is_prefill else (0, 1, 1, 1, 2)
        self.lengths = draw.lengths("lengths", count, edges, longest)
        kinds = ("device", "host", "equal", "plan") if self.is_prefill else ("device", "equal")
        self.metadata = draw.choice("metadata", kinds)
        if self.metadata == "equal":
            self.lengths = [self.lengths[0]] * count
        self.is_pool = draw.chance("pool", 0.6)
        self.has_initial = self.is_pool or draw.chance("initial state", 0.7)
        self.v_first = draw.chance("V first", 0.5)
        self.padded = {n for n in range(count) if self.is_pool and draw.chance(f"padded {n}", 0.1)}
        self.cold = {n for n in range(count) if self.is_pool and draw.chance(f"cold {n}", 0.2)}
        self.layout = draw.choice("layout", ("contiguous", "packed", "unaligned"))
        # an output has rows that follow one another as those of one tensor
        aliases = self.layout == "contiguous" or self.metadata != "equal"
        self.out_is = draw.choice("out", ("new", "own", "v") if aliases else ("new", "own"))
        self.keeps_states = self.is_prefill and self.layer.tracks
        self._allocate(draw)

    def _make(self, seed: int) -> Case:
        return make_case(
            seed, self.lengths, regime=self.regimes, device=self.device, **self.layer.arguments
        )

    def _allocate(self, draw: Draw) -> None:
        self.case = case = self._make(draw.seed())
        self.selection = drawn_selection(draw, self.target, case.shape, self.operator)
        device, count = self.device, len(self.lengths)
        self.tokens = laid_out(self.layout, [x[0] for x in case.tokens])
        gate = case.inputs[1]
        a_log, dt_bias = (None if x is None else x.clone() for x in gate[1:3])
        self.gate = gate._replace(a_log=a_log, dt_bias=dt_bias)
        host = torch.tensor(offsets_of(self.lengths), dtype=self.layer.offsets_dtype)
        self.cu_seqlens, self.cu_host = host.to(device, copy=True), host
        slots = draw.shuffled(range(count + 2))[:count]
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        indices = [-1 if n in self.padded else slot for n, slot in enumerate(slots)]
        self.indices = torch.tensor(indices, dtype=torch.int32, device=device)
        warm = [n not in self.cold for n in range(count)]
        self.warm = torch.tensor(warm, device=device)
        state = case.state
        self.memory = poisoned(
            (count + 2) * (state[0].numel() + 16), dtype=self.layer.state_dtype, device=device
        )
        size = state[0].numel() + 16
        self.pool = self.memory.as_strided(
            (count + 2, *state.shape[1:]), (size, *state[0].stride())
        )
        self.initial = torch.empty_like(state if self.v_first else state.mT.contiguous())
        self.out = (
            None
            if self.out_is == "new"
            else poisoned(*case.v.shape[1:], dtype=case.v.dtype, device=device)
        )
        self.scratch = Scratch(device) if self.is_prefill and draw.chance("scratch", 0.7) else None
        self.snapshots = None
        if self.keeps_states and draw.chance("snapshots", 0.7):
            pooled = self.layer.state_dtype if self.is_pool else torch.float32
            self.snapshots = Snapshots(draw, count, state.shape[1:], device, pooled)
        self.result: SequencesResult

    def batch(self) -> FuzzBatch:
        return FuzzBatch(self.fill, self.run, self.error)

    def fill(self, seed: int) -> None:
        """New contents, and where a GPU alone knows the offsets new lengths of the same sum."""
        if self.metadata == "device" and self.device.type == "cuda":
            rng, total = random.Random(seed), sum(self.lengths)
            cuts = sorted(rng.randint(0, total) for _ in self.lengths[1:])
            self.lengths = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
            self.cu_seqlens.copy_(cu_tensor(self.lengths, self.device))
        self.case = case = self._make(seed)
        for own, x in zip(self.tokens, case.tokens, strict=True):
            own.copy_(x[0])
        for parameter, drawn in zip(self.gate[1:3], case.inputs[1][1:3], strict=True):
            if parameter is not None and drawn is not None:
                parameter.copy_(drawn)
        self.memory.fill_(math.nan)
        self.pool.fill_(_UNTOUCHED)
        start = case.state.to(self.layer.state_dtype)
        self.pool[self.slots] = start
        for n in self.cold:
            self.pool[self.slots[n]] = math.nan
        for n in self.padded:
            self.pool[self.slots[n]] = _UNTOUCHED
        self.initial.copy_(case.state if self.v_first else case.state.mT)
        self.before = self.memory.clone()
        if self.snapshots is not None:
            self.snapshots.fill()
        if self.out is not None:
            self.out.fill_(math.nan)

    def run(self) -> None:
        rows = [x[None] for x in self.tokens]
        count = len(self.lengths)
        plan: StepPlan | torch.Tensor | None = self.cu_seqlens
        extra: dict[str, Any] = {"selection": self.selection}
        if self.metadata == "equal":
            each, plan = (count, self.lengths[0]), None
            rows = [torch.unflatten(x, 1, each)[0] for x in rows]
        elif self.metadata == "plan":
            plan = build_step_plan(
                self.cu_seqlens,
                sum(self.lengths),
                cu_seqlens_cpu=self.cu_host,
                chunk_table=self.selection.target.vendor != "cpu",
            )
        elif self.metadata == "host":
            extra["cu_seqlens_cpu"] = self.cu_host
        if self.out_is == "v":
            extra["out"] = rows[2]
        elif self.out is not None:
            extra["out"] = self.out.view(rows[2].shape)
        if self.is_pool:
            state = StateRef.pool(self.pool, self.indices, self.warm)
        else:
            initial = self.initial if self.has_initial else None
            state = StateRef.functional(initial, v_first=self.v_first, final=True)
        tokens = self.case.inputs_of(rows)[0]
        if not self.is_prefill:
            assert not isinstance(plan, StepPlan)
            self.result = kda_recurrent(tokens, self.gate, state, plan, **extra)
            return
        if self.snapshots is not None:
            state = self.snapshots.added_to(state)
        extra |= {"scratch": self.scratch, "keeps_chunk_states": self.keeps_states}
        self.result = kda_prefill(tokens, self.gate, state, plan, **extra)

    def error(self) -> tuple[float, float]:
        case, layer = self.case, self.layer
        start = case.state.to(layer.state_dtype) if self.is_pool else case.state
        start = start.double()
        from_zero = sorted(self.cold | self.padded) if self.has_initial else list(range(len(start)))
        start[from_zero] = 0.0
        scale = case.q.shape[3] ** -0.5
        activated = case.activated(self.device)
        chunk_states = start[:0]
        if max(self.lengths) > _SHORT or (self.keeps_states and any(self.lengths)):
            want_o, want, chunk_states = reference.chunk_kda(
                *activated, scale=scale, state=start, cu_seqlens=case.offsets
            )
        if max(self.lengths) <= _SHORT:
            want_o, want = reference.recurrent_kda(
                *activated, scale=scale, state=start, cu_seqlens=case.offsets
            )
        o = self.result.out.reshape(want_o.shape)
        live = [n for n in range(len(want)) if n not in self.padded]
        got = self.pool[self.slots] if self.is_pool else self.result.final_state
        assert got is not None
        if not self.is_pool and not self.v_first:
            got = got.mT
        allowed = self._allowed()
        size = natural_size(activated[0], want, case.offsets, scale)
        found = [
            sequence_error(o, want_o, size, case.offsets, allowed[0]),
            state_error(got[live], want[live], allowed[1]),
        ]
        if self.is_pool:
            mine, theirs = self.memory.clone(), self.before.clone()
            for memory in (mine, theirs):
                view = memory.as_strided(self.pool.shape, self.pool.stride())
                view[self.slots[live]] = 0.0
            expect_untouched("a state outside the call", theirs, mine)
        if self.keeps_states:
            states = self.result.chunk_states
            assert states is not None
            states = states if self.v_first or self.is_pool else states.mT
            filled = states[: len(chunk_states)]
            if self.metadata != "device" and len(states) != len(chunk_states):
                raise AssertionError(f"{len(chunk_states)} chunks, states of {len(states)}")
            found.append(state_error(filled, chunk_states, max(allowed[1], 4e-3)))
        if self.snapshots is not None:
            pairs = self.snapshots.compared(self.lengths, chunk_states, want)
            found += [state_error(*pair, allowed[1]) for pair in pairs]
        return worst(*found)

    def _allowed(self) -> tuple[float, float]:
        output, state = TOLERANCES[self.case.q.dtype]
        if self.case.beta_kind == "twice_sigmoid" and "collinear" in self.regimes:
            output, state = _REFLECTIONS * output, _REFLECTIONS * state
        if self.is_pool and self.layer.state_dtype == torch.bfloat16:
            state = STEP_TOLERANCES[torch.bfloat16][1]
        return output, state


def laid_out(layout: str, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """q, k, v, g and beta ``[T, heads, ...]`` in memory of their own, to be filled.

    ``packed``: q, k and v are views of one row per token; ``unaligned``: rows that no vector load
    takes.
    """
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tokens]
    if layout == "contiguous":
        return found
    rows = len(tokens[0])
    begin = int(layout == "unaligned")
    widths = [x[0].numel() if rows else math.prod(x.shape[1:]) for x in tokens[:3]]
    memory = tokens[0].new_empty(rows, sum(widths) + 8 + begin)
    for i, (x, width) in enumerate(zip(tokens[:3], widths, strict=True)):
        found[i] = torch.unflatten(memory[:, begin : begin + width], 1, x.shape[1:])
        begin += width
    return found


def natural_size(
    q: torch.Tensor, state: torch.Tensor, offsets: list[int], scale: float
) -> torch.Tensor:
    """``[T, HV]``: the size that an output row has if query and state do not cancel.

    |scale S q| for a query in no particular direction: scale |S| |q| / sqrt(K). The error of a row
    that does cancel is compared with this.
    """
    heads, key_dim = state.shape[1], q.shape[2]
    norms = q.norm(dim=2).repeat_interleave(heads // q.shape[1], 1)
    counts = torch.tensor(offsets, device=q.device).diff()
    of_token = torch.repeat_interleave(state.flatten(2).norm(dim=2), counts, 0)
    size: torch.Tensor = scale * norms * of_token / key_dim**0.5
    return size


def sequence_error(
    got: torch.Tensor,
    want: torch.Tensor,
    size: torch.Tensor,
    offsets: list[int],
    allowed: float,
) -> tuple[float, float]:
    """The worst relative L2 of outputs ``[T, HV, V]``, by head, and by sequence and head."""
    difference = (got.double() - want).square().sum(2)
    whole = torch.maximum(want.square().sum(2), size.square())
    counts = torch.tensor(offsets, device=got.device).diff()
    owner = torch.repeat_interleave(torch.arange(len(counts), device=got.device), counts)
    parts = [
        x.new_zeros(len(counts), x.shape[1]).index_add(0, owner, x) for x in (difference, whole)
    ]
    by_part = relative(*parts) / ONE_HEAD
    by_head = relative(difference.sum(0), whole.sum(0)) / _WHOLE_HEAD
    return max(_largest(by_part), _largest(by_head)), allowed


def state_error(got: torch.Tensor, want: torch.Tensor, allowed: float) -> tuple[float, float]:
    """The worst relative L2 of states ``[N, HV, V, K]``, by sequence and head."""
    difference = (got.double() - want).square().sum((2, 3))
    return _largest(relative(difference, want.square().sum((2, 3)))) / ONE_HEAD, allowed


def relative(difference: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """sqrt(difference / whole), 0 where there is no difference."""
    return torch.where(difference == 0.0, 0.0, (difference / whole).sqrt())


def _largest(x: torch.Tensor) -> float:
    """0 of nothing; NaN is infinite."""
    return float(x.nan_to_num(math.inf, math.inf).max()) if x.numel() else 0.0


CASES: Mapping[str, FuzzCase] = {
    "prefill": sequences_case("prefill"),
    "recurrent": sequences_case("recurrent"),
}
