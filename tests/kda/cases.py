"""Inputs of the KDA operators, what the definition says of them, and the checks of a result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PathSelection, load_table
from backend_core.target import KNOWN_TARGETS, Target, detect_target
from kda_backend import chunk_kda, fused_recurrent_kda, reference
from kda_backend.scratch import Workspace
from kda_backend.selection import KdaPlan, KdaShape, select

ON_GPU = torch.cuda.is_available()
# paths written in Triton, which the interpreter runs
INTERPRETED = {"two_stage", "recurrent"}
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 129, 257)
REGIMES = ("random", "hf_init", "weak", "long_tailed", "extreme", "collinear")
LOWER_BOUND = -5.0

# Relative L2 against float64: (output, state). 16-bit inputs: the project's bounds; rounding the
# output alone costs 1.7e-3 in bf16, and 3.3e-3 under the interpreter, which truncates instead.
# fp32 inputs on a GPU: exponentials and logarithms are 2^-22 approximations there, and the gate
# multiplies theirs by exp(A_log), up to 201.
_FP32 = 1e-4 if ON_GPU else 1e-5
TOLERANCES = {
    torch.bfloat16: (5e-3, 4e-3),
    torch.float16: (2e-3, 2e-3),
    torch.float32: (_FP32, _FP32),
}
# A single sequence and head has few elements: the error of a dot product may meet a small value.
ONE_HEAD = 4.0


@dataclass(frozen=True)
class Case:
    """One call's inputs, all sequences packed in one row.

    Attributes:
        lengths: tokens of each sequence.
        q, k, v, g, beta: as the operators take them, ``[1, T, ...]``.
        a_log, dt_bias: fp32 or ``None``.
        state: ``[N, HV, V, K]`` fp32 before each sequence.
        gate: ``"log"``, ``"softplus"`` or ``"bounded"``.
        beta_kind: ``"given"``, ``"sigmoid"`` or ``"twice_sigmoid"``.
    """

    lengths: tuple[int, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    state: torch.Tensor
    gate: str
    beta_kind: str
    l2norm: bool
    scale: float | None

    @property
    def offsets(self) -> list[int]:
        return offsets_of(self.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return cu_tensor(self.lengths, self.q.device)

    @property
    def shape(self) -> KdaShape:
        heads, key_dim = self.q.shape[2:]
        value_heads, value_dim = self.v.shape[2:]
        bounded = self.gate == "bounded"
        dtypes = self.q.dtype, self.g.dtype
        return KdaShape(heads, value_heads, key_dim, value_dim, bounded, *dtypes)

    @property
    def tokens(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k, self.v, self.g, self.beta)

    def options(self) -> dict[str, Any]:
        """The keyword arguments that say how the tokens are meant."""
        return {
            "scale": self.scale,
            "use_qk_l2norm_in_kernel": self.l2norm,
            "use_gate_in_kernel": self.gate != "log",
            "lower_bound": LOWER_BOUND if self.gate == "bounded" else None,
            "use_beta_sigmoid_in_kernel": self.beta_kind != "given",
            "allow_neg_eigval": self.beta_kind == "twice_sigmoid",
            "A_log": self.a_log,
            "dt_bias": self.dt_bias,
        }

    def activated(self) -> tuple[torch.Tensor, ...]:
        """Packed q, k, v, log decay and step size in float64, on the CPU."""
        q, k, v, g, beta = (x[0].double().cpu() for x in self.tokens)
        if self.l2norm:
            q, k = reference.l2norm(q), reference.l2norm(k)
        if self.gate != "log":
            a_log, dt_bias = (
                None if x is None else x.double().cpu() for x in (self.a_log, self.dt_bias)
            )
            bound = LOWER_BOUND if self.gate == "bounded" else None
            g = reference.log_decay(g, a_log, dt_bias, bound)
        if self.beta_kind != "given":
            beta = beta.sigmoid() * (2.0 if self.beta_kind == "twice_sigmoid" else 1.0)
        return q, k, v, g, beta

    def expected(self, *, from_zero: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, HV, V] and state [N, HV, V, K] by the recurrence in float64, on the CPU."""
        state = self.state.double().cpu()
        scale = self.q.shape[3] ** -0.5 if self.scale is None else self.scale
        return reference.recurrent_kda(
            *self.activated(),
            scale=scale,
            state=torch.zeros_like(state) if from_zero else state,
            cu_seqlens=self.offsets,
        )

    def to(self, device: torch.device) -> Case:
        moved = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)

    def part(self, begin: int, end: int, state: torch.Tensor) -> Case:
        """Tokens begin to end of a case of one sequence, as a sequence that starts at ``state``."""
        tokens = {name: getattr(self, name)[:, begin:end] for name in TOKEN_FIELDS}
        return dataclasses.replace(self, **tokens, lengths=(end - begin,), state=state)

    def only(self, n: int) -> Case:
        """Sequence n alone."""
        begin, end = self.offsets[n : n + 2]
        return self.part(begin, end, self.state[n : n + 1])


TOKEN_FIELDS = ("q", "k", "v", "g", "beta")


def offsets_of(lengths: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


def chunks_of(lengths: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """First token and token count of each chunk, and first chunk of each sequence."""
    start, length, offsets = [], [], [0]
    token = 0
    for n in lengths:
        for begin in range(0, n, 64):
            start.append(token + begin)
            length.append(min(64, n - begin))
        token += n
        offsets.append(len(start))
    return start, length, offsets


def cu_tensor(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(offsets_of(lengths), dtype=torch.int32, device=device)


def make_case(
    seed: int,
    lengths: Sequence[int] = (65,),
    *,
    regime: str = "random",
    gate: str = "softplus",
    with_a_log: bool = True,
    beta: str = "sigmoid",
    heads: int = 1,
    value_heads: int | None = None,
    key_dim: int = 32,
    value_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    l2norm: bool = True,
    scale: float | None = None,
) -> Case:
    """Draw a case on the CPU; the regimes are those that the measured baselines define.

    random       A_log = log U(1, 16), dt_bias N(0, 1), raw gate N(0, 1)
    hf_init      A_log = log U(1, 16), dt_bias = softplus^-1 of log-uniform [1e-3, 1e-1],
                 raw gate 0.3 N(0, 1)
    weak         A_log 0, dt_bias -5.5, raw gate 0.3 N(0, 1)
    long_tailed  A_log N(1.3, 1.3) up to 5.3, dt_bias N(-3, 2), raw gate N(0, 3)
    extreme      exp(A_log) = 201; two channels of three decay by up to e^2661 a token and e^-6e4 a
                 chunk, the third one keeps its state
    collinear    keys 1 % apart, beta ~ 1, decay ~ 1
    """
    rng = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng)

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=rng)

    value_heads = heads if value_heads is None else value_heads
    total = sum(lengths)
    q, k = randn(1, total, heads, key_dim), randn(1, total, heads, key_dim)
    v, logit = randn(1, total, value_heads, value_dim), randn(1, total, value_heads)
    raw = randn(1, total, value_heads, key_dim)
    a_log = (1.0 + 15.0 * rand(value_heads)).log()
    dt_bias = randn(value_heads, key_dim)
    if regime == "hf_init":
        step = (math.log(1e-3) + rand(value_heads, key_dim) * math.log(100.0)).exp()
        dt_bias, raw = step + torch.log(-torch.expm1(-step)), 0.3 * raw
    elif regime == "weak":
        a_log, dt_bias, raw = torch.zeros(value_heads), torch.full_like(dt_bias, -5.5), 0.3 * raw
    elif regime == "long_tailed":
        a_log = (1.3 + 1.3 * randn(value_heads)).clamp(max=5.3)
        dt_bias, raw = 2.0 * dt_bias - 3.0, 3.0 * raw
    elif regime == "extreme":
        a_log = torch.full((value_heads,), math.log(201.0))
        strong = torch.arange(key_dim) % 3 > 0
        dt_bias = torch.where(strong, 4.0 + dt_bias.abs(), dt_bias - 12.0)
        raw = torch.where(strong, 4.0, 1.0) * raw
        if total:
            raw[0, total // 2, :, 1 % key_dim] = 14.0
    elif regime == "collinear":
        a_log, dt_bias = torch.full((value_heads,), -5.0), torch.full_like(dt_bias, -5.0)
        k, logit = k[:, :1] + 0.01 * k, logit + 6.0
    elif regime != "random":
        raise ValueError(f"regime must be one of {', '.join(REGIMES)}, got {regime}")
    if gate == "log":
        raw = reference.log_decay(raw, a_log, dt_bias, None)
    if beta == "given":
        logit = logit.sigmoid()
    if not l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    return Case(
        tuple(lengths),
        *(x.to(dtype) for x in (q, k, v, raw, logit)),
        a_log if gate != "log" and with_a_log else None,
        dt_bias if gate != "log" else None,
        randn(len(lengths), value_heads, value_dim, key_dim),
        gate,
        beta,
        l2norm,
        scale,
    )


@dataclass(frozen=True)
class Backend:
    """Kernel paths under test, the device they run on, and the model that a case has by default.

    ``kernels``: the Triton paths that the table of the H200 chooses, natively where there is a
    GPU (whose own table then chooses), else on CPU tensors under the interpreter.
    ``kernels_128``: what a GPU's table chooses for K = V = 128, which may be a path for that alone.
    ``torch``: the CPU's path.
    """

    name: str
    device: torch.device

    def case(
        self, seed: int, lengths: Sequence[int] = (65,), *, dims: str = "", **model: Any
    ) -> Case:
        """A case on the device.

        Args:
            dims: of the model, where it does not give its own: ``"narrow"`` in V, which the
                interpreter is quick on, or ``"uneven"``, K and V of which neither is a power of 2.
        """
        if self.name == "kernels_128":
            model = {"key_dim": 128, "value_dim": 128} | model
        elif dims:
            model |= {"narrow": {"value_dim": 16}, "uneven": {"key_dim": 48, "value_dim": 24}}[dims]
        return make_case(seed, lengths, **model).to(self.device)

    @property
    def target(self) -> Target:
        if self.name == "torch":
            return KNOWN_TARGETS["cpu"]
        return detect_target() if ON_GPU else KNOWN_TARGETS["H200"]

    def plan(self, shape: KdaShape) -> KdaPlan:
        """What the table chooses; under the interpreter, of the paths that it can run."""
        plan = select(self.target, shape)
        if self.name == "torch" or ON_GPU:
            return plan
        for phase in ("prefill", "decode"):
            rows = [row for row in load_table("kda", self.target).rows if row.phase == phase]
            paths = getattr(plan, phase).paths
            if not all(path.name in INTERPRETED for path in paths):
                plan = one_path(plan, phase, next(row for row in rows if row.name in INTERPRETED))
        return plan

    def plan_of(self, shape: KdaShape, phase: str, path_name: str) -> KdaPlan:
        """A plan with one named path of the table for every grid of a phase, else skip."""
        for row in load_table("kda", self.target).rows:
            if (row.phase, row.name) == (phase, path_name):
                return one_path(self.plan(shape), phase, row)
        pytest.skip(f"no {path_name} in the table of {self.target.arch}")

    def chunk(self, case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
        """``chunk_kda`` of a case: the functional form with states [V, K], unless overridden."""
        return chunk_kda(*case.tokens, **self._arguments(case, overrides))

    def recurrent(self, case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
        return fused_recurrent_kda(*case.tokens, **self._arguments(case, overrides))

    def assert_same(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """The same inputs in other memory: the same bits from a kernel, while torch's own matrix
        products sum in an order that depends on strides and sizes."""
        if self.name == "torch":
            assert_close(name, got, want, 1e-6 if want.dtype == torch.float32 else 5e-3)
        else:
            assert_same_bits(name, got, want)

    def _arguments(self, case: Case, overrides: dict[str, Any]) -> dict[str, Any]:
        arguments = case.options() | {"plan": self.plan(case.shape)}
        if not overrides.keys() & {"metadata", "cu_seqlens"}:
            arguments["cu_seqlens"] = case.cu_seqlens
        if "state_pool" not in overrides:
            arguments |= {
                "initial_state": case.state,
                "output_final_state": True,
                "state_v_first": True,
            }
        return arguments | overrides


def shipped_rows(phase: str) -> list[Any]:
    """Each distinct row of the tables that can be run here, as parameters of a test."""
    rows = {}
    for target in [detect_target()] if ON_GPU else KNOWN_TARGETS.values():
        for row in load_table("kda", target).rows:
            runs = row.name in INTERPRETED or (ON_GPU and row.name != "reference")
            if row.phase == phase and runs:
                name = f"{target.arch}-{row.name}-{row.max_grid}"
                rows[row.name, tuple(row.params.items())] = pytest.param(row, id=name)
    return list(rows.values())


Run = Callable[..., tuple[torch.Tensor, ...]]


def one_path(plan: KdaPlan, phase: str, path: KernelPath) -> KdaPlan:
    """The plan with one path for every grid of a phase."""
    return dataclasses.replace(plan, **{phase: PathSelection(phase, (path,), (), ())})


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over all elements; nan or inf where anything is not finite."""
    want = want.double().cpu()
    error = (got.double().cpu() - want).norm().item()
    size = want.norm().item()
    return error / size if size else (0.0 if error == 0.0 else math.inf)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f"{name} has shape {list(got.shape)}, not {list(want.shape)}"
    error = rel_l2(got, want)
    # not "error > tolerance": a nan must fail
    assert error <= tolerance, f"{name} is off by {error:.2e}, allowed {tolerance:.1e} (rel. L2)"


def assert_same_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, name
    got, want = (x.contiguous().view(torch.uint8) for x in (got, want))
    assert torch.equal(got, want), f"{name} differs in {(got != want).sum().item()} bytes"


def assert_result(
    case: Case, o: torch.Tensor, state: torch.Tensor | None, *, from_zero: bool = False
) -> None:
    """A result is the definition's: in all, and for each sequence and head on its own."""
    want_o, want_state = case.expected(from_zero=from_zero)
    tol_o, tol_state = TOLERANCES[case.q.dtype]
    o = o.reshape(want_o.shape)
    assert o.dtype == case.v.dtype
    assert_close("output", o, want_o, tol_o)
    for n, (begin, end) in enumerate(zip(case.offsets, case.offsets[1:], strict=False)):
        for h in range(case.v.shape[2]):
            where = f"of sequence {n}, head {h}"
            got, want = o[begin:end, h], want_o[begin:end, h]
            assert_close(f"output {where}", got, want, ONE_HEAD * tol_o)
            if state is not None:
                got, want = state[n, h], want_state[n, h]
                assert_close(f"state {where}", got, want, ONE_HEAD * tol_state)
    if state is not None:
        assert_close("state", state, want_state, tol_state)


def assert_causal(case: Case, run: Run, positions: Sequence[int]) -> None:
    """Changing the tokens of a sequence from t on leaves the bits of all outputs before t.

    The later gates are pushed to both extremes, in turn over the channels: what looks ahead at
    them would scale earlier rows.
    """
    before, _ = run(case)
    for t in positions:
        changed = {name: getattr(case, name).clone() for name in TOKEN_FIELDS}
        for name in ("q", "k", "v", "beta"):
            changed[name][:, t:] = 3.0 - 2.0 * changed[name][:, t:]
        changed["g"][:, t:, :, 0::2] = -40.0
        # a log decay is not positive
        changed["g"][:, t:, :, 1::2] = 0.0 if case.gate == "log" else 40.0
        after, _ = run(dataclasses.replace(case, **changed))
        assert not torch.equal(after[:, t:], before[:, t:])
        assert_same_bits(f"output before token {t}", after[:, :t], before[:, :t])


def assert_splits_agree(case: Case, run: Run, splits: Sequence[int], tolerance: float) -> None:
    """One call on a sequence equals two calls with the state handed over, at each split."""
    o, state = run(case)
    for split in splits:
        first, middle = run(case.part(0, split, case.state))
        second, last = run(case.part(split, case.lengths[0], middle))
        assert_close(f"output split at {split}", torch.cat([first, second], 1), o, tolerance)
        assert_close(f"state split at {split}", last, state, tolerance)


def poisoned(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(size, math.nan, dtype=dtype, device=device)


def spoil(workspace: Workspace) -> None:
    """Make every byte of the scratch part of a NaN; the flags are the kernels' memory."""
    flags = workspace.flags()
    for buffer in vars(workspace).values():
        if buffer is not flags:
            buffer.view(torch.uint8).fill_(255)


class Pool:
    """A state pool of NaN whose slots are further apart than a state needs, around it and between.

    Attributes:
        view: ``[slots, HV, V, K]``, what the operator gets.
    """

    def __init__(self, slots: int, case: Case, dtype: torch.dtype, gap: int = 48) -> None:
        size = case.state[0].numel()
        device = case.state.device
        self._memory = poisoned(slots * (size + gap) + gap, dtype=dtype, device=device)
        self.view = self._memory.as_strided(
            (slots, *case.state.shape[1:]), (size + gap, *case.state[0].stride()), gap
        )

    def fill(self, slots: Sequence[int], states: torch.Tensor) -> None:
        for slot, state in zip(slots, states, strict=True):
            self.view[slot] = state.to(self.view.dtype)

    def states(self, slots: Sequence[int]) -> torch.Tensor:
        return self.view[list(slots)]

    def assert_only_changed(self, before: Pool, slots: Sequence[int]) -> None:
        """Every bit outside ``slots`` is as it was."""
        mine, theirs = self.copy(), before.copy()
        for pool in (mine, theirs):
            pool.view[list(slots)] = 0.0
        assert_same_bits("pool outside the written slots", mine._memory, theirs._memory)

    def copy(self) -> Pool:
        other = object.__new__(Pool)
        other._memory = self._memory.clone()
        other.view = other._memory.as_strided(
            self.view.shape, self.view.stride(), self.view.storage_offset()
        )
        return other
