"""Random decode steps and verifications of drafts, against float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from backend_core.target import Target
from backend_core.testing.numerics import as_bytes, poisoned
from kda_backend import kda_decode_step, kda_verify_step
from kda_backend.contract.values import DraftInputs, StateRef
from kda_backend.testing.steps import StepCase, StepPools, make_step
from kda_backend.testing.tolerances import ONE_HEAD, STEP_TOLERANCES
from tools.fuzz.batches import (
    Draw,
    FuzzBatch,
    FuzzCase,
    MismatchError,
    expect_untouched,
    worst,
)
from tools.fuzz.kda import (
    Layer,
    drawn_regimes,
    drawn_selection,
    relative,
    state_error,
)

MAX_ROWS = 9
MAX_DRAFT = 4


STEP_LAYERS = (
    Layer("vLLM's Kimi-Linear"),
    Layer(
        "bounded gate, windows by channel, bf16 state",
        {"gate": "bounded", "has_bias": False},
        state_dtype=torch.bfloat16,
        layout="DS",
    ),
    Layer(
        "state update alone, grouped heads, fp16 state",
        {"has_conv": False, "has_norm": False, "heads": 1},
        state_dtype=torch.float16,
    ),
    Layer(
        "decays given, twice sigmoid",
        {"gate": "log", "beta_kind": "twice_sigmoid", "has_norm": False},
    ),
    Layer(
        "fp32, K 48, V 24",
        {"has_conv": False, "l2norm": False, "beta_kind": "given", "dtype": torch.float32}
        | {"key_dim": 48, "value_dim": 24},
    ),
)


class Rows:
    """A layer's rows and pools, whose tensors stay while their contents change."""

    def __init__(
        self, operator: str, draw: Draw, target: Target, device: torch.device, tokens: int
    ) -> None:
        self.device, self.tokens = device, tokens
        self.layer = draw.choice("layer", STEP_LAYERS)
        self.regimes = drawn_regimes(draw, self.layer.arguments["value_heads"])
        self.case = self._make(draw.seed())
        self.selection = drawn_selection(draw, target, self.case.shape, operator)
        # engines hand out views of wider rows
        gap = draw.choice("gap", (0, 8, 1))
        for name in ("packed", "g", "z"):
            x = getattr(self.case, name)
            wide = x.new_empty(tokens, math.prod(x.shape[1:]) + gap)
            view = torch.unflatten(wide[:, : math.prod(x.shape[1:])], 1, x.shape[1:])
            changed: dict[str, Any] = {name: view}
            self.case = dataclasses.replace(self.case, **changed)

    def _make(self, seed: int) -> StepCase:
        return make_step(
            seed, self.tokens, device=self.device, regime=self.regimes, **self.layer.arguments
        )

    def refill(self, seed: int) -> None:
        drawn = self._make(seed)
        for field in dataclasses.fields(self.case):
            mine, other = getattr(self.case, field.name), getattr(drawn, field.name)
            if isinstance(mine, torch.Tensor):
                mine.copy_(other)


def fill_pools(pools: StepPools, seed: int, slots: list[int]) -> None:
    """NaN but for the slots, which get numbers."""
    rng = torch.Generator(pools.memory.device).manual_seed(seed)
    pools.memory.fill_(math.nan)
    pools.window_memory.fill_(math.nan)
    for pool in (pools.states, pools.windows):
        shape = (len(slots), *pool.shape[1:])
        pool[slots] = torch.randn(shape, generator=rng, device=rng.device).to(pool.dtype)


def tolerances(layer: Layer) -> tuple[float, float]:
    output, state = STEP_TOLERANCES[layer.state_dtype]
    return ONE_HEAD * output, state  # of one row and head


def output_error(got: torch.Tensor, want: torch.Tensor, allowed: float) -> tuple[float, float]:
    """The worst relative L2 of rows and heads ``[n, HV, V]``."""
    difference = (got.double() - want).square().sum(2)
    # a row that cancels is compared with what rows of this head are
    whole = torch.maximum(want.square().sum(2), want.square().sum(2).mean(0) / 100.0)
    found = relative(difference, whole).nan_to_num(math.inf, math.inf)
    return (float(found.max()) if found.numel() else 0.0), allowed


class _Step(Rows):
    """``kda_decode_step``."""

    def __init__(self, draw: Draw, target: Target, device: torch.device) -> None:
        super().__init__("decode_step", draw, target, device, draw.integer("rows", 1, MAX_ROWS))
        rows = self.tokens
        self.pools = StepPools(
            self.case, rows + 3, dtype=self.layer.state_dtype, layout=self.layer.layout
        )
        self.null_slot = 0 if draw.chance("null slot", 0.5) else None
        self.slots = draw.shuffled(range(1, rows + 3))[:rows]
        pad = [draw.chance(f"padded {n}", 0.15) for n in range(rows)]
        self.live = [n for n in range(rows) if not pad[n]]
        padding = [-1] if self.null_slot is None else [-1, 0]
        table = [
            draw.choice(f"padding {n}", padding) if pad[n] else slot
            for n, slot in enumerate(self.slots)
        ]
        self.indices = torch.tensor(table, dtype=torch.int32, device=device)
        self.is_safe = draw.chance("safe to prefetch", 0.5)
        self.out = None
        if draw.chance("own output", 0.5):
            shape = (rows, *self.case.z.shape[1:])
            self.out = poisoned(*shape, dtype=self.case.z.dtype, device=device)
        self.result = self.case.z
        self.last_write = torch.zeros(1, device=device)

    def fill(self, seed: int) -> None:
        self.refill(seed)
        fill_pools(self.pools, seed + 1, self.slots)
        self.before = self.pools.copy()
        if self.out is not None:
            self.out.fill_(math.nan)
        self.last_write.zero_()  # the launch between, which a step that may prefetch asks for

    def run(self) -> None:
        self.result = kda_decode_step(
            *self.case.inputs,
            StateRef.pool(self.pools.states, self.indices, null_slot=self.null_slot),
            pdl_prefetch_safe=self.is_safe,
            out=self.out,
            selection=self.selection,
            **self.case.stages(self.pools.windows),
        )

    def error(self) -> tuple[float, float]:
        live, slots = self.live, [self.slots[n] for n in self.live]
        dead = [n for n in range(self.tokens) if n not in live]
        if bool(self.result[dead].any()):
            raise MismatchError("a padded row's output is not zero")
        output, state = tolerances(self.layer)
        if not live:
            expect_untouched("a state", self.before.memory, self.pools.memory)
            return 0.0, output
        want_o, want_s, want_w = self.case.expected_rows(
            live, self.before.states[slots], self.before.windows[slots]
        )
        found = [
            output_error(self.result[live], want_o, output),
            state_error(self.pools.states[slots], want_s, state),
        ]
        if self.case.has_conv:
            got = self.pools.windows[slots].double()
            if not torch.equal(got, want_w):
                raise MismatchError("a convolution window differs from that of the definition")
            self.before.windows[slots] = self.pools.windows[slots]
        self.before.states[slots] = self.pools.states[slots]
        expect_untouched("a state elsewhere", self.before.memory, self.pools.memory)
        expect_untouched("a window elsewhere", self.before.window_memory, self.pools.window_memory)
        return worst(*found)


class _Draft(Rows):
    """``kda_verify_step``, in both forms of keeping states."""

    def __init__(self, draw: Draw, target: Target, device: torch.device) -> None:
        count = draw.integer("sequences", 1, 4)
        self.is_rolling = draw.chance("a slot for each token", 0.5)
        self.longest = draw.integer("longest", 1, MAX_DRAFT)
        self.lengths = [draw.integer(f"length {n}", 0, self.longest) for n in range(count)]
        equal = draw.chance("equal", 0.3)
        if equal:
            self.lengths = [self.longest] * count
        super().__init__("verify", draw, target, device, sum(self.lengths))
        self.begins = [sum(self.lengths[:n]) for n in range(count)]
        layer, tokens = self.layer, self.longest if self.is_rolling else 1
        width = self.longest + 2 if self.is_rolling else 3
        self.pools = StepPools(
            self.case, count * tokens + 2, dtype=layer.state_dtype, layout=layer.layout, width=width
        )
        places = draw.shuffled(range(1, count * tokens + 2))[: count * tokens]
        self.table = [places[n * tokens : (n + 1) * tokens] for n in range(count)]
        self.padded = {n for n in range(count) if draw.chance(f"padded {n}", 0.15)}
        for n in self.padded:
            self.table[n] = [-1] * tokens
        self.slots = places
        self.accepted = [draw.integer(f"accepted {n}", 1, self.longest) for n in range(count)]
        self.out = poisoned(
            self.tokens, *self.case.z.shape[1:], dtype=self.case.z.dtype, device=device
        )
        self._keep(equal, draw)

    def _keep(self, equal: bool, draw: Draw) -> None:
        """Where states are read, and where those after each token are kept."""
        count, device = len(self.lengths), self.device

        def ints(values: list[int] | list[list[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        table = ints(self.table)
        self.indices = table if self.is_rolling else table[:, 0].contiguous()
        cu_seqlens = None if equal else ints([*self.begins, self.tokens])
        if self.is_rolling:
            self.draft = DraftInputs.in_pool(ints(self.accepted), cu_seqlens)
            return
        self.rows = draw.shuffled(range(count + 2))[:count]
        states = (count + 2, self.longest, *self.pools.states.shape[1:])
        self.states = poisoned(*states, dtype=self.layer.state_dtype, device=device)
        windows = None
        if self.case.has_conv:
            shape = (count + 2, self.longest, 3, self.case.channels)
            self.windows = poisoned(*shape, dtype=self.case.z.dtype, device=device)
            windows = self.windows.transpose(2, 3)
        self.draft = DraftInputs.in_buffers(self.states, ints(self.rows), windows, cu_seqlens)

    def fill(self, seed: int) -> None:
        self.refill(seed)
        fill_pools(self.pools, seed + 1, self.slots)
        self.before = self.pools.copy()
        self.out.fill_(math.nan)
        if not self.is_rolling:
            self.states.fill_(math.nan)
            if self.case.has_conv:
                self.windows.fill_(math.nan)

    def run(self) -> None:
        kda_verify_step(
            *self.case.inputs,
            StateRef.pool(self.pools.states, self.indices, null_slot=0),
            self.draft,
            out=self.out,
            selection=self.selection,
            **self.case.stages(self.pools.windows),
        )

    def error(self) -> tuple[float, float]:
        output, state = tolerances(self.layer)
        found = [(0.0, output)]
        for n in self.padded:
            own = slice(self.begins[n], self.begins[n] + self.lengths[n])
            if bool(as_bytes(self.out[own]).any()):
                raise MismatchError("the output of a padded sequence is not zero")
        live = [n for n in range(len(self.lengths)) if n not in self.padded]
        first = [self.accepted[n] - 1 if self.is_rolling else 0 for n in range(len(self.lengths))]
        states = self.before.states[[self.table[n][first[n]] for n in live]].double()
        windows = [self.before.windows[self.table[n][0], :, first[n] : first[n] + 3] for n in live]
        window = torch.stack(windows).double() if windows else self.before.windows[:0]
        for t in range(self.longest):
            now = [i for i, n in enumerate(live) if t < self.lengths[n]]
            if not now:
                break
            rows = [self.begins[live[i]] + t for i in now]
            out, after, window_after = self.case.expected_rows(rows, states[now], window[now])
            states[now], window[now] = after, window_after
            found.append(output_error(self.out[rows], out, output))
            got = self._kept([live[i] for i in now], t)
            found.append(state_error(got, after, 2.0 * state))
            self._check_windows([live[i] for i in now], t, window_after)
        self._check_elsewhere(live, first)
        return worst(*found)

    def _kept(self, sequences: list[int], t: int) -> torch.Tensor:
        """The states after token t, which are then forgotten."""
        if self.is_rolling:
            memory, at = self.pools.states, [self.table[n][t] for n in sequences]
            kept = memory[at]
            # what an earlier token of the draft left where a later one was read is compared by now
            self.before.states[at] = kept
            return kept
        rows = [self.rows[n] for n in sequences]
        kept = self.states[rows, t]
        self.states[rows, t] = math.nan
        return kept

    def _check_windows(self, sequences: list[int], t: int, want: torch.Tensor) -> None:
        if not self.case.has_conv or self.is_rolling:
            return
        rows = [self.rows[n] for n in sequences]
        if not torch.equal(self.windows[rows, t].transpose(1, 2).double(), want):
            raise MismatchError(f"the window after token {t} differs from that of the definition")
        self.windows[rows, t] = math.nan

    def _check_elsewhere(self, live: list[int], first: list[int]) -> None:
        if not self.is_rolling:
            if not bool(self.states.isnan().all()):
                raise MismatchError("a state was kept that belongs to no token")
            if self.case.has_conv and not bool(self.windows.isnan().all()):
                raise MismatchError("a window was kept that belongs to no token")
        elif self.case.has_conv:
            for n in live:
                slot, begin, length = self.table[n][0], self.begins[n], self.lengths[n]
                if not length:
                    continue  # the window rolls by what is drafted
                window = self.before.windows[slot, :, first[n] + 1 : first[n] + 3].clone()
                self.before.windows[slot, :, :2] = window
                drafted = self.case.packed[begin : begin + length].T
                self.before.windows[slot, :, 2 : 2 + length] = drafted
        expect_untouched("a state elsewhere", self.before.memory, self.pools.memory)
        expect_untouched("a window elsewhere", self.before.window_memory, self.pools.window_memory)


def step_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random call of ``kda_decode_step``."""
    step = _Step(draw, target, device)
    return FuzzBatch(step.fill, step.run, step.error)


def verify_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random call of ``kda_verify_step``."""
    draft = _Draft(draw, target, device)
    return FuzzBatch(draft.fill, draft.run, draft.error)


CASES: Mapping[str, FuzzCase] = {"decode_step": step_case, "verify": verify_case}
