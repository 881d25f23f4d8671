"""What ``kda-dsv4 check`` asks of a KDA path: calls as engines make them, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PathSelection
from backend_core.target import Target
from kda_backend import chunk_kda, fused_recurrent_kda, reference
from kda_backend.selection import KdaPlan, KdaShape

HARD_HEADS = ("random", "extreme", "collinear", "long")
"""The gate regimes of a hard call's heads, in turn; docs/evaluating.md describes them."""

# Relative L2 of output and state. 16-bit inputs: the project's bounds. fp32: exponentials and
# logarithms on a GPU are 2^-22 approximations, and the gate multiplies theirs by up to 201.
ALLOWED = {torch.bfloat16: (5e-3, 4e-3), torch.float32: (1e-4, 1e-4)}
_UNTOUCHED = 12345.0


@dataclass(frozen=True)
class Call:
    """One call's inputs on the CPU.

    Attributes:
        q, k: ``[T, H, K]``; v: ``[T, HV, V]``; g: ``[T, HV, K]``, raw; beta: ``[T, HV]``, logits.
        a_log: ``[HV]``; dt_bias: ``[HV, K]``; fp32.
        state: ``[N, HV, V, K]`` fp32 before each sequence.
        lengths: tokens of each sequence.
        cold: the sequence that starts from zero; padded: the one without a slot; or ``None``.
        lower_bound: of the gate, or ``None``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor
    lengths: tuple[int, ...]
    cold: int | None
    padded: int | None
    lower_bound: float | None

    @property
    def offsets(self) -> list[int]:
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    def shape(self) -> KdaShape:
        heads, key_dim = self.q.shape[1:]
        value_heads, value_dim = self.v.shape[1:]
        bounded = self.lower_bound is not None
        return KdaShape(heads, value_heads, key_dim, value_dim, bounded, self.q.dtype, self.g.dtype)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, HV, V] and states [N, HV, V, K] in float64, token by token."""
        q, k, v, g, beta = (x.double() for x in (self.q, self.k, self.v, self.g, self.beta))
        state = self.state.double()
        for n in (self.cold, self.padded):
            if n is not None:
                state[n] = 0
        return reference.recurrent_kda(
            reference.l2norm(q),
            reference.l2norm(k),
            v,
            reference.log_decay(g, self.a_log.double(), self.dt_bias.double(), self.lower_bound),
            beta.sigmoid(),
            scale=q.shape[2] ** -0.5,
            state=state,
            cu_seqlens=self.offsets,
        )


def gate_parameters(
    regime: str, raw: torch.Tensor, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(A_log [heads], dt_bias [heads, K], raw gate [T, heads, K]) of one regime.

    ``extreme`` is the largest exp(A_log) of Kimi-Linear's checkpoint, 201: two channels of three
    decay by up to e^2661 a token, the third keeps its state.
    """
    heads, channels = raw.shape[1:]
    a_log = (1.0 + 15.0 * torch.rand(heads, generator=rng)).log()
    dt_bias = torch.randn(heads, channels, generator=rng)
    if regime == "extreme":
        strong = torch.arange(channels) % 3 > 0
        dt_bias = torch.where(strong, 4.0 + dt_bias.abs(), dt_bias - 12.0)
        return torch.full((heads,), math.log(201.0)), dt_bias, torch.where(strong, 4.0, 1.0) * raw
    if regime == "collinear":
        return torch.full((heads,), -5.0), torch.full_like(dt_bias, -5.0), raw
    if regime == "long":
        a_log = (1.3 + 1.3 * torch.randn(heads, generator=rng)).clamp(max=5.3)
        return a_log, 2.0 * dt_bias - 3.0, 3.0 * raw
    return a_log, dt_bias, raw


def make_call(
    lengths: tuple[int, ...],
    heads: int,
    value_heads: int,
    *,
    key_dim: int = 128,
    value_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    regimes: tuple[str, ...] = ("random",),
    lower_bound: float | None = None,
    cold: int | None = None,
    padded: int | None = None,
) -> Call:
    """Draw a call; value heads take the regimes in turn."""
    rng = torch.Generator().manual_seed(17)
    total = sum(lengths)
    q, k = (torch.randn(total, heads, key_dim, generator=rng) for _ in range(2))
    v = torch.randn(total, value_heads, value_dim, generator=rng)
    g = torch.randn(total, value_heads, key_dim, generator=rng)
    beta = torch.randn(total, value_heads, generator=rng)
    a_log, dt_bias = torch.empty(value_heads), torch.empty(value_heads, key_dim)
    for i, regime in enumerate(regimes):
        part = slice(i, None, len(regimes))
        a_log[part], dt_bias[part], g[:, part] = gate_parameters(regime, g[:, part], rng)
        if regime == "collinear":
            k[:, part] = k[:1, part] + 0.01 * k[:, part]
            beta[:, part] += 6.0
    state = 0.3 * torch.randn(len(lengths), value_heads, value_dim, key_dim, generator=rng)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    return Call(q, k, v, g, beta, a_log, dt_bias, state, lengths, cold, padded, lower_bound)


def small(phase: str) -> Call:
    """Two value heads over one key head, two sequences, every sequence with its state."""
    return make_call((65, 17) if phase == "prefill" else (1, 1), 1, 2)


def hard(phase: str, lower_bound: float | None = None) -> Call:
    """Four regimes of gate and keys, ragged lengths, a cold and a padded row."""
    lengths = (1, 63, 64, 150, 5) if phase == "prefill" else (1,) * 5
    return make_call(lengths, 8, 8, regimes=HARD_HEADS, lower_bound=lower_bound, cold=2, padded=4)


def uneven(phase: str) -> Call:
    """fp32, with dimensions that no tile divides."""
    lengths = (70, 3) if phase == "prefill" else (1, 1)
    return make_call(lengths, 1, 2, key_dim=48, value_dim=24, dtype=torch.float32)


def cases(path: KernelPath) -> dict[str, Callable[[], Call]]:
    """The calls that ``path`` must get right, by name."""
    phase = path.phase
    found = {"small": lambda: small(phase), "adversarial": lambda: hard(phase)}
    if "bounded_gate" in path.features:
        found["adversarial, bounded gate"] = lambda: hard(phase, -5.0)
    if {"any_dtype", "any_head_dim", "grouped_values"} <= path.features:
        found["fp32, K 48, V 24"] = lambda: uneven(phase)
    return found


Operator = Callable[..., torch.Tensor]
"""Takes tokens as views ``[T, heads, ...]``, then keywords; returns the output ``[T, HV, V]``."""


def run(
    path: KernelPath,
    target: Target,
    device: torch.device,
    call: Call,
    operator: Operator | None = None,
) -> tuple[float, float]:
    """Run one call on ``path``, by default through the operator of its phase.

    States are slots of a pool in which a cold row's slot is NaN; tokens are views into one buffer.

    Returns:
        (error, allowed): relative L2 against float64 of the output or the states of one regime's
        heads, whichever uses most of its bound.

    Raises:
        RuntimeError: the call wrote a slot that is not its own, or the padded row's.
    """
    pool, slots, warm = _pool(call)
    pool = pool.to(device)
    if operator is None:
        operator = _prefill(call) if path.phase == "prefill" else _decode
    o = operator(
        *_tokens(call, device),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=call.lower_bound,
        A_log=call.a_log.to(device),
        dt_bias=call.dt_bias.flatten().to(device),
        state_pool=pool,
        state_indices=slots.to(device),
        has_initial_state=warm.to(device),
        plan=only(path, target, call.shape()),
    )
    return _worst_error(call, o.cpu(), pool.cpu(), slots)


def _pool(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pool [N + 2, HV, V, K], slots [N] int32 (in falling order) and which rows have a state."""
    sequences = len(call.lengths)
    slots = torch.arange(sequences, 0, -1, dtype=torch.int32)
    pool = torch.full((sequences + 2, *call.state.shape[1:]), _UNTOUCHED)
    pool[slots.long()] = call.state
    warm = torch.ones(sequences, dtype=torch.bool)
    if call.cold is not None:
        pool[slots[call.cold]], warm[call.cold] = math.nan, False
    if call.padded is not None:
        pool[slots[call.padded]], slots[call.padded] = _UNTOUCHED, -1
    return pool, slots, warm


def _tokens(call: Call, device: torch.device) -> list[torch.Tensor]:
    """q, k and v as views of one row a token, as engines project them; g and beta."""
    packed = torch.cat([x.flatten(1) for x in (call.q, call.k, call.v)], 1).to(device)
    views, begin = [], 0
    for x in (call.q, call.k, call.v):
        width = x[0].numel()
        views.append(packed[:, begin : begin + width].view(-1, *x.shape[1:]))
        begin += width
    return [*views, call.g.to(device), call.beta.to(device)]


def _prefill(call: Call) -> Operator:
    def operator(*tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        arguments["cu_seqlens"] = torch.tensor(
            call.offsets, dtype=torch.int32, device=tokens[0].device
        )
        q, k, v, g, beta = (x[None] for x in tokens)
        return chunk_kda(q, k, v, g, beta, **arguments)[0][0]

    return operator


def _decode(*tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
    q, k, v, g, beta = (x[:, None] for x in tokens)
    return fused_recurrent_kda(q, k, v, g, beta, **arguments)[0][:, 0]


def _worst_error(
    call: Call, o: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor
) -> tuple[float, float]:
    own = slots[slots >= 0].long()
    others = torch.ones(len(pool), dtype=torch.bool)
    others[own] = False
    if not bool((pool[others] == _UNTOUCHED).all()):
        raise RuntimeError("a state slot outside the call was written")
    want_o, want_states = call.expected()
    results = ((o, want_o), (pool[own], want_states[slots >= 0]))
    groups = len(HARD_HEADS) if call.v.shape[1] % len(HARD_HEADS) == 0 else 1
    errors = [
        (relative_error(got[:, i::groups], want[:, i::groups]), bound)
        for (got, want), bound in zip(results, ALLOWED[call.q.dtype], strict=True)
        for i in range(groups)
    ]
    return max(errors, key=lambda pair: pair[0] / pair[1])


def only(path: KernelPath, target: Target, shape: KdaShape) -> KdaPlan:
    """A plan that runs one path for every grid of its phase."""
    prefill, decode = (PathSelection(phase, (path,), (), ()) for phase in ("prefill", "decode"))
    return KdaPlan(target, shape, prefill, decode)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over all elements; infinite where anything is not finite."""
    error = float((got.double() - want).norm() / want.norm())
    return error if math.isfinite(error) else math.inf
