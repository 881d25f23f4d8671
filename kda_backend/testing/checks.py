"""The calls of ``kda-dsv4 check`` for a KDA path, as engines make them, against float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from backend_core.family import CheckCase
from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from backend_core.testing.numerics import relative_error
from kda_backend import chunk_kda, fused_recurrent_kda, kda_decode_step, kda_verify_step
from kda_backend.selection import KdaSelection, KdaShape, select
from kda_backend.spec import CHUNK
from kda_backend.testing import layer_checks
from kda_backend.testing.cases import Case, make_case
from kda_backend.testing.regimes import HARD_REGIMES
from kda_backend.testing.steps import StepCase, StepPools, make_step
from kda_backend.testing.tolerances import STEP_TOLERANCES, TOLERANCES

Answer = tuple[float, float]
_SEED = 17
_UNTOUCHED = 12345.0
_DRAFT = 3
_ROWS = 5
_PADDED, _COLD = 4, 2  # of the rows of an adversarial call


def check_cases(path: KernelPath) -> dict[str, CheckCase]:
    """The calls that ``path`` must get right, by name; each returns (error, allowed)."""
    if path.operator == "decode_step":
        return {
            "state update alone": _step_case(path, has_conv=False, has_norm=False),
            "convolution, norm": _step_case(path),
            "convolution, norm, bounded gate": _step_case(path, gate="bounded"),
        }
    if path.operator == "verify":
        return {f"drafts of {_DRAFT}": lambda target, device: run_draft(path, target, device)}
    found = {"small": _sequence_case(path, small), "adversarial": _sequence_case(path, hard)}
    if "bounded_gate" in path.features:
        found["adversarial, bounded gate"] = _sequence_case(path, hard, gate="bounded")
    if {"any_dtype", "any_head_dim", "grouped_values"} <= path.features:
        found["fp32, K 48, V 24"] = _sequence_case(path, uneven)
    # rows that the lengths choose, as the host knows them
    if short := path.max_longest:
        found["short sequences"] = _known_lengths(path, (1, short // 4, short // 2 + 1, short))
    if least := path.min_longest:
        long = max(least, 3 * CHUNK * getattr(path.params, "segment_chunks", 1)) + 70
        found["a long sequence"] = _known_lengths(path, (long, 5, least // 4 + 1))
    if path.operator == "prefill":
        for name, dtype in (("", torch.float32), (", bf16 states", torch.bfloat16)):
            check = functools.partial(layer_checks.run, path, state_dtype=dtype)
            found[f"layer with a checkpoint{name}"] = check
    return found


def _sequence_case(path: KernelPath, draw: Callable[..., Case], **model: Any) -> CheckCase:
    return lambda target, device: run(path, target, device, draw(path.operator, **model))


def _known_lengths(path: KernelPath, lengths: tuple[int, ...]) -> CheckCase:
    def check(target: Target, device: torch.device) -> Answer:
        case = make_case(_SEED, lengths, heads=2, key_dim=128, value_dim=128)
        return run(path, target, device, case, _prefill(case, on_host=True))

    return check


def _step_case(path: KernelPath, **flags: Any) -> CheckCase:
    return lambda target, device: run_step(path, target, device, **flags)


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


Operator = Callable[..., torch.Tensor]
"""Takes tokens as views ``[T, heads, ...]``, then keywords; returns the output ``[T, HV, V]``."""


def run(
    path: KernelPath,
    target: Target,
    device: torch.device,
    case: Case,
    operator: Operator | None = None,
) -> Answer:
    """Run one call on ``path``, by default through its operator.

    States are slots of a pool, in falling order. Of five sequences one starts from zero, although
    its slot is NaN, and one is padding. Tokens are views of one packed row, as engines have them.

    Returns:
        (error, allowed): relative L2 against float64 of the output or the states of one regime's
        heads, whichever uses most of its bound.

    Raises:
        RuntimeError: the call wrote a slot that is not its own, or the padded row's.
    """
    sequences = len(case.lengths)
    slots = torch.arange(sequences, 0, -1, dtype=torch.int32)
    pool = torch.full((sequences + 2, *case.state.shape[1:]), _UNTOUCHED)
    pool[slots.long()] = case.state
    warm = torch.ones(sequences, dtype=torch.bool)
    from_zero: tuple[int, ...] = ()
    if sequences == _ROWS:
        from_zero = (_COLD, _PADDED)
        pool[slots[_COLD]], warm[_COLD] = math.nan, False
        pool[slots[_PADDED]], slots[_PADDED] = _UNTOUCHED, -1
    pool = pool.to(device)
    if operator is None:
        operator = _prefill(case) if path.operator == "prefill" else _recurrent
    o = operator(
        *_packed_views(case, device),
        **case.to(device).options(),
        state_pool=pool,
        state_indices=slots.to(device),
        has_initial_state=warm.to(device),
        selection=forced(path, target, case.shape),
    )
    states, live = pool.cpu(), slots >= 0
    own = slots[live].long()
    _expect_untouched(torch.full_like(states, _UNTOUCHED), states, own)
    want_o, want_states = case.expected(from_zero=from_zero)
    results = ((o.cpu(), want_o), (states[own], want_states[live]))
    return _worst(results, TOLERANCES[case.q.dtype])


def _packed_views(case: Case, device: torch.device) -> list[torch.Tensor]:
    """q, k and v as views of one row per token, as engines project them; g and beta."""
    packed = torch.cat([x[0].flatten(1) for x in (case.q, case.k, case.v)], 1).to(device)
    views, begin = [], 0
    for x in (case.q, case.k, case.v):
        width = x.shape[2] * x.shape[3]
        views.append(packed[:, begin : begin + width].view(-1, *x.shape[2:]))
        begin += width
    return [*views, case.g[0].to(device), case.beta[0].to(device)]


def _prefill(case: Case, *, on_host: bool = False) -> Operator:
    def operator(*tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        q, k, v, g, beta = (x[None] for x in tokens)
        arguments["cu_seqlens"] = case.cu_seqlens.to(q.device)
        arguments["cu_seqlens_cpu"] = case.cu_seqlens.cpu() if on_host else None
        return chunk_kda(q, k, v, g, beta, **arguments)[0][0]

    return operator


def _recurrent(*tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    q, k, v, g, beta = (x[:, None] for x in tokens)
    return fused_recurrent_kda(q, k, v, g, beta, **arguments)[0][:, 0]


def run_step(path: KernelPath, target: Target, device: torch.device, **flags: Any) -> Answer:
    """``kda_decode_step`` for five rows, the last of them padded; ``flags`` as `StepCase` has.

    Raises:
        RuntimeError: a padded row's output, the window or another slot is not as it must be.
    """
    case, pools, slots = _step_inputs(_ROWS, device, **flags)
    before = pools.copy()
    q, k, v, g, beta = case.tokens
    o = kda_decode_step(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        state_pool=pools.states,
        state_indices=torch.tensor(slots, dtype=torch.int32, device=device),
        selection=forced(path, target, case.shape),
        **case.options(pools.windows),
    ).cpu()
    if o[_PADDED].any():
        raise RuntimeError("a padded row's output is not zero")
    live = slots[:_PADDED]
    want = [
        case.expected(row, before.states[slot].cpu(), before.windows[slot].cpu())
        for row, slot in enumerate(live)
    ]
    own = torch.tensor(live)
    for old, new in ((before.states, pools.states), (before.windows, pools.windows)):
        _expect_untouched(old.cpu(), new.cpu(), own)
    want_o, want_states, want_windows = (torch.stack(parts) for parts in zip(*want, strict=True))
    got_windows = pools.windows.cpu()[own].double()
    if case.has_conv and not torch.equal(got_windows, want_windows):
        raise RuntimeError("the convolution's window differs from that of the definition")
    results = ((o[:_PADDED], want_o), (pools.states.cpu()[own], want_states))
    return _worst(results, STEP_TOLERANCES[torch.float32])


def run_draft(path: KernelPath, target: Target, device: torch.device) -> Answer:
    """``kda_verify_step`` with buffers: the pool stays, the state after each token is kept.

    Raises:
        RuntimeError: the pool was written.
    """
    case, pools, slots = _step_inputs(_ROWS * _DRAFT, device, has_conv=False, has_norm=False)
    before = pools.copy()
    shape = (_ROWS, _DRAFT, *pools.states.shape[1:])
    kept = torch.full(shape, math.nan, device=device)
    q, k, v, g, beta = case.tokens
    o = kda_verify_step(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        state_pool=pools.states,
        state_indices=torch.tensor(slots, dtype=torch.int32, device=device),
        intermediate_states=kept,
        intermediate_indices=torch.arange(_ROWS, dtype=torch.int32, device=device),
        selection=forced(path, target, case.shape),
        **case.options(None),
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
    return _worst(results, STEP_TOLERANCES[torch.float32])


def _step_inputs(
    tokens: int, device: torch.device, **flags: Any
) -> tuple[StepCase, StepPools, list[int]]:
    """A layer of 8 heads of 128, filled pools, and the slots of five rows, the last padded."""
    model: dict[str, Any] = {"heads": 8, "key_dim": 128, "value_dim": 128}
    case = make_step(_SEED, tokens, device=device, regime=HARD_REGIMES, **model, **flags)
    pools = StepPools(case, _ROWS + 2)
    pools.fill(_SEED, list(range(_ROWS + 2)))
    return case, pools, [5, 4, 3, 2, -1]


def forced(path: KernelPath, target: Target, shape: KdaShape) -> KdaSelection:
    """A selection that runs one path for every grid of its operator."""
    return select(target, shape).with_path(path)


def _expect_untouched(before: torch.Tensor, after: torch.Tensor, own: torch.Tensor) -> None:
    others = torch.ones(len(before), dtype=torch.bool)
    others[own] = False
    if not torch.equal(before[others], after[others]):
        raise RuntimeError("a state slot outside the call was written")


def _worst(
    results: Iterable[tuple[torch.Tensor, torch.Tensor]], allowed: tuple[float, float]
) -> Answer:
    """Of output and states ``[n, HV, ...]``, by regime, the error that uses most of its bound."""
    errors = []
    for (got, want), bound in zip(results, allowed, strict=True):
        groups = len(HARD_REGIMES) if want.shape[1] % len(HARD_REGIMES) == 0 else 1
        for i in range(groups):
            error = relative_error(got[:, i::groups], want[:, i::groups])
            errors.append((error, bound))
    return max(errors, key=lambda pair: pair[0] / pair[1])
