"""The calls of ``kda-dsv4 check`` for a KDA path, as engines make them, against float64."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from backend_core.family import CheckCase
from backend_core.tables.schema import Row
from backend_core.target import Target
from backend_core.testing.numerics import as_bytes, relative_error
from kda_backend import kda_decode_step, kda_prefill, kda_recurrent, kda_verify_step, layer
from kda_backend.contract.values import DraftInputs, StateRef
from kda_backend.layer import LayerWeights, Projections
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection, KdaShape, select
from kda_backend.spec import CHUNK
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import Case, cu_tensor, make_case
from kda_backend.testing.record_checks import run_records
from kda_backend.testing.regimes import HARD_REGIMES
from kda_backend.testing.steps import EPS, StepCase, StepPools, make_step
from kda_backend.testing.tolerances import LAYER_TOLERANCE, STEP_TOLERANCES, TOLERANCES

Answer = tuple[float, float]
_SEED = 17
_UNTOUCHED = 12345.0
_DRAFT = 3
_ROWS = 5
_PADDED, _COLD = 4, 2  # of the rows of an adversarial call


def check_cases(row: Row) -> dict[str, CheckCase]:
    """The calls that ``row`` must get right, by name; each returns (error, allowed)."""
    if row.operator == "decode_step":
        return {
            "state update alone": _step_case(row, has_conv=False, has_norm=False),
            "convolution, norm": _step_case(row),
            "convolution, norm, bounded gate": _step_case(row, gate="bounded"),
            "convolution, norm, bf16 states": _step_case(row, state_dtype=torch.bfloat16),
            "convolution, norm, fp16 states": _step_case(row, state_dtype=torch.float16),
        }
    if row.operator == "verify":
        return {
            f"drafts of {_DRAFT}": functools.partial(run_draft, row),
            f"drafts of {_DRAFT}, fp16 states": functools.partial(
                run_draft, row, state_dtype=torch.float16
            ),
        }
    if row.operator == "verify_records":
        return {
            "records of drafts": functools.partial(run_records, row),
            "records of drafts, bounded gate": functools.partial(
                run_records, row, gate="bounded", has_norm=False
            ),
            "records of drafts, fp16 states": functools.partial(
                run_records, row, state_dtype=torch.float16
            ),
        }
    found = {"small": _sequence_case(row, small), "adversarial": _sequence_case(row, hard)}
    found["adversarial, fp16 states"] = _sequence_case(row, hard, state_dtype=torch.float16)
    if "bounded_gate" in row.features:
        found["adversarial, bounded gate"] = _sequence_case(row, hard, gate="bounded")
    if {"any_dtype", "any_head_dim", "grouped_values"} <= row.features:
        found["fp32, K 48, V 24"] = _sequence_case(row, uneven)
    if row.name == "two_stage_sm90":  # few are scanned by halves, by another kernel
        found["many sequences"] = _known_lengths(row, (3,) * 24)
    # rows that the lengths choose, as the host knows them
    if short := row.max_longest:
        found["short sequences"] = _known_lengths(row, (1, short // 4, short // 2 + 1, short))
    if least := row.min_longest:
        long = max(least, 3 * CHUNK * getattr(row.params, "segment_chunks", 1)) + 70
        found["a long sequence"] = _known_lengths(row, (long, 5, least // 4 + 1))
    if row.operator == "prefill":
        for name, dtype in (
            ("", torch.float32),
            (", bf16 states", torch.bfloat16),
            (", fp16 states", torch.float16),
        ):
            check = functools.partial(run_layer, row, state_dtype=dtype)
            found[f"layer with a checkpoint{name}"] = check
    return found


def _sequence_case(
    row: Row,
    draw: Callable[..., Case],
    state_dtype: torch.dtype = torch.float32,
    **model: Any,
) -> CheckCase:
    return lambda target, device: run(
        row, target, device, draw(row.operator, **model), state_dtype=state_dtype
    )


def _known_lengths(row: Row, lengths: tuple[int, ...]) -> CheckCase:
    def check(target: Target, device: torch.device) -> Answer:
        case = make_case(_SEED, lengths, heads=2, key_dim=128, value_dim=128)
        return run(row, target, device, case, on_host=True)

    return check


def _step_case(row: Row, **flags: Any) -> CheckCase:
    return lambda target, device: run_step(row, target, device, **flags)


def small(operator: str) -> Case:
    """Two value heads over one key head, two sequences, every sequence with its state."""
    lengths = (65, 17) if operator == "prefill" else (1, 1)
    return make_case(_SEED, lengths, value_heads=2, key_dim=128, value_dim=128)


def hard(operator: str, gate: str = "softplus") -> Case:
    """Four regimes of gate and keys, and ragged lengths; `run` adds a cold and a padded row."""
    lengths = (1, 63, 64, 150, 5) if operator == "prefill" else (1,) * _ROWS
    model: dict[str, Any] = {"heads": 8, "key_dim": 128, "value_dim": 128}
    return make_case(_SEED, lengths, regime=HARD_REGIMES, gate=gate, **model)


def uneven(operator: str) -> Case:
    """fp32, with dimensions that no tile divides."""
    lengths = (70, 3) if operator == "prefill" else (1, 1)
    model: dict[str, Any] = {"value_heads": 2, "key_dim": 48, "value_dim": 24}
    return make_case(_SEED, lengths, dtype=torch.float32, **model)


def run(
    row: Row,
    target: Target,
    device: torch.device,
    case: Case,
    *,
    on_host: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> Answer:
    """Run one call on ``row`` through its operator.

    States are slots of a pool, in falling order. Of five sequences one starts from zero, although
    its slot is NaN, and one is padding. Tokens are views of one packed row, as engines have them.

    Args:
        on_host: the host knows the lengths.
        state_dtype: of the pool.

    Returns:
        (error, allowed): relative L2 against float64 of the output or the states of one regime's
        heads, whichever uses most of its bound.

    Raises:
        RuntimeError: the call wrote a slot that is not its own, or the padded row's.
    """
    sequences = len(case.lengths)
    case = dataclasses.replace(case, state=case.state.to(state_dtype).float())
    slots = torch.arange(sequences, 0, -1, dtype=torch.int32)
    pool = torch.full((sequences + 2, *case.state.shape[1:]), _UNTOUCHED, dtype=state_dtype)
    pool[slots.long()] = case.state.to(state_dtype)
    warm = torch.ones(sequences, dtype=torch.bool)
    from_zero: tuple[int, ...] = ()
    if sequences == _ROWS:
        from_zero = (_COLD, _PADDED)
        pool[slots[_COLD]], warm[_COLD] = math.nan, False
        pool[slots[_PADDED]], slots[_PADDED] = _UNTOUCHED, -1
    pool = pool.to(device)
    there = case.to(device)
    packed = torch.cat([x[0].flatten(1) for x in there.tokens[:3]], 1)
    views = torch.split(packed, [x.shape[2] * x.shape[3] for x in there.tokens[:3]], 1)
    rows = [y.view(len(packed), *x.shape[2:]) for x, y in zip(there.tokens[:3], views, strict=True)]
    rows += [there.g[0], there.beta[0]]
    state = StateRef.pool(pool, slots.to(device), warm.to(device))
    selection = forced(row, target, case.shape)
    if row.operator == "prefill":
        tokens, gate = there.inputs_of([x[None] for x in rows])
        host = case.cu_seqlens if on_host else None
        cu_seqlens = there.cu_seqlens
        o = kda_prefill(
            tokens, gate, state, cu_seqlens, cu_seqlens_cpu=host, selection=selection
        ).out[0]
    else:
        tokens, gate = there.inputs_of([x[:, None] for x in rows])
        o = kda_recurrent(tokens, gate, state, selection=selection).out[:, 0]
    states, live = pool.cpu(), slots >= 0
    own = slots[live].long()
    _expect_untouched(torch.full_like(states, _UNTOUCHED), states, own)
    want_o, want_states = case.expected(from_zero=from_zero)
    results = ((o.cpu(), want_o), (states[own], want_states[live]))
    return _worst(results, TOLERANCES[case.q.dtype])


def run_layer(
    row: Row,
    target: Target,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
) -> Answer:
    """One prefill of a layer, from convolution to checkpoint, of three sequences in an engine's
    pools. One leaves a checkpoint.

    Raises:
        RuntimeError: a window of the convolution differs from its tokens, or another slot changed.
    """
    lengths, slots, warm = (20, 3, 70), (4, 1, 3), (True, False, True)
    kept_of, kept_in, null_slot = 2, 0, 5  # the sequence, after one chunk; slots
    model: dict[str, Any] = {"key_dim": 128, "value_dim": 128, "has_bias": False}
    case = make_step(_SEED, sum(lengths), device=device, **model)
    wide = torch.cat([case.packed, case.beta, case.beta], 1)  # a row of the packed projection
    x = Projections(
        wide[:, : case.channels],
        case.g,
        wide[:, case.channels : case.channels + case.heads],
        case.z,
        torch.full_like(case.z, math.nan),
    )
    pools = StepPools(case, 6, dtype=state_dtype)
    pools.fill(_SEED, list(range(6)))
    before = pools.copy()
    offsets, places = (torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2))
    places.fill_(null_slot)
    offsets[kept_of], places[kept_of] = CHUNK, kept_in
    bounds = cu_tensor(lengths, torch.device("cpu"))
    layer.prefill(
        LayerWeights(case.conv_weight, case.inputs[1], case.norm_weight, EPS),
        forced(row, target, case.shape),
        x,
        pools.windows,
        StateRef.pool(
            pools.states,
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor(warm, device=device),
        ),
        build_step_plan(
            bounds.to(device),
            sum(lengths),
            cu_seqlens_cpu=bounds,
            chunk_table=target.vendor != "cpu",
        ),
        Scratch(device),
        checkpoints=Checkpoints.of(offsets, places, null_slot),
    )
    outputs, begin = [], 0
    for n, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        state, window = before.states[slot].cpu() * warm[n], before.windows[slot].cpu() * warm[n]
        for t in range(length):
            o, state, window = case.expected(begin + t, state, window)
            outputs.append(o)
            if n == kept_of and t + 1 == CHUNK:
                before.states[kept_in], before.windows[kept_in] = state, window
        before.states[slot], before.windows[slot] = state, window
        begin += length
    if not torch.equal(pools.windows, before.windows):
        raise RuntimeError("a window of the convolution is not of its sequence's last tokens")
    written = [*slots, kept_in]
    states = zip(pools.states[written].cpu(), before.states[written].cpu(), strict=True)
    errors = [relative_error(x.out.cpu(), torch.stack(outputs))]
    errors += [relative_error(*pair) for pair in states]
    before.states[written] = pools.states[written]
    if not torch.equal(as_bytes(before.memory), as_bytes(pools.memory)):
        raise RuntimeError("a state slot outside the call was written")
    return max(errors), LAYER_TOLERANCE


def run_step(
    row: Row,
    target: Target,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
    **flags: Any,
) -> Answer:
    """``kda_decode_step`` for five rows, the last of them padded; ``flags`` as `StepCase` has.

    Raises:
        RuntimeError: a padded row's output, the window or another slot is not as it must be.
    """
    case, pools, slots = _step_inputs(_ROWS, device, state_dtype, **flags)
    before = pools.copy()
    o = kda_decode_step(
        *case.inputs,
        StateRef.pool(pools.states, torch.tensor(slots, dtype=torch.int32, device=device)),
        **case.stages(pools.windows),
        selection=forced(row, target, case.shape),
    ).cpu()
    if o[_PADDED].any():
        raise RuntimeError("a padded row's output is not zero")
    live = slots[:_PADDED]
    want = [
        case.expected(number, before.states[slot].cpu(), before.windows[slot].cpu())
        for number, slot in enumerate(live)
    ]
    own = torch.tensor(live)
    for old, new in ((before.states, pools.states), (before.windows, pools.windows)):
        _expect_untouched(old.cpu(), new.cpu(), own)
    want_o, want_states, want_windows = (torch.stack(parts) for parts in zip(*want, strict=True))
    got_windows = pools.windows.cpu()[own].double()
    if case.has_conv and not torch.equal(got_windows, want_windows):
        raise RuntimeError("the convolution's window differs from that of the definition")
    results = ((o[:_PADDED], want_o), (pools.states.cpu()[own], want_states))
    return _worst(results, STEP_TOLERANCES[state_dtype])


def run_draft(
    row: Row,
    target: Target,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
) -> Answer:
    """``kda_verify_step`` with buffers: the pool stays, the state after each token is kept.

    Raises:
        RuntimeError: the pool was written.
    """
    bare = {"has_conv": False, "has_norm": False}
    case, pools, slots = _step_inputs(_ROWS * _DRAFT, device, state_dtype, **bare)
    before = pools.copy()
    shape = (_ROWS, _DRAFT, *pools.states.shape[1:])
    kept = torch.full(shape, math.nan, dtype=state_dtype, device=device)
    o = kda_verify_step(
        *case.inputs,
        StateRef.pool(pools.states, torch.tensor(slots, dtype=torch.int32, device=device)),
        DraftInputs.in_buffers(kept, torch.arange(_ROWS, dtype=torch.int32, device=device)),
        selection=forced(row, target, case.shape),
    ).cpu()
    _expect_untouched(before.states.cpu(), pools.states.cpu(), torch.empty(0, dtype=torch.int64))
    outputs, states = [], []
    for n, slot in enumerate(slots[:_PADDED]):
        state, window = before.states[slot].cpu(), before.windows[slot].cpu()
        for t in range(_DRAFT):
            output, state, window = case.expected(n * _DRAFT + t, state, window)
            outputs.append(output)
            states.append(state)
    got_states = kept[:_PADDED].flatten(0, 1).cpu()
    results = ((o[: _PADDED * _DRAFT], torch.stack(outputs)), (got_states, torch.stack(states)))
    return _worst(results, STEP_TOLERANCES[state_dtype])


def _step_inputs(
    tokens: int, device: torch.device, state_dtype: torch.dtype, **flags: Any
) -> tuple[StepCase, StepPools, list[int]]:
    """A layer of 8 heads of 128, filled pools, and the slots of five rows, the last padded."""
    model: dict[str, Any] = {"heads": 8, "key_dim": 128, "value_dim": 128}
    case = make_step(_SEED, tokens, device=device, regime=HARD_REGIMES, **model, **flags)
    pools = StepPools(case, _ROWS + 2, dtype=state_dtype)
    pools.fill(_SEED, list(range(_ROWS + 2)))
    return case, pools, [5, 4, 3, 2, -1]


def forced(row: Row, target: Target, shape: KdaShape) -> KdaSelection:
    """A selection that runs one path for every grid of its operator."""
    return select(target, shape).with_path(row)


def _expect_untouched(before: torch.Tensor, after: torch.Tensor, own: torch.Tensor) -> None:
    others = torch.ones(len(before), dtype=torch.bool)
    others[own] = False
    if not torch.equal(before[others], after[others]):
        raise RuntimeError("a state slot outside the call was written")


def _worst(
    results: Iterable[tuple[torch.Tensor, torch.Tensor]], allowed: tuple[float, float]
) -> Answer:
    """The error that uses most of its bound, of output and states ``[n, HV, ...]`` by regime."""
    errors = []
    for (got, want), bound in zip(results, allowed, strict=True):
        groups = len(HARD_REGIMES) if want.shape[1] % len(HARD_REGIMES) == 0 else 1
        for i in range(groups):
            error = relative_error(got[:, i::groups], want[:, i::groups])
            errors.append((error, bound))
    return max(errors, key=lambda pair: pair[0] / pair[1])
