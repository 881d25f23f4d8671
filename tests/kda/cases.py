"""The kernel paths under test, and the checks of a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from backend_core.target import KNOWN_TARGETS, Target, detect_target
from backend_core.testing.numerics import poisoned, relative_error
from kda_backend.family import FAMILY
from kda_backend.launch_params import TABLES
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection, KdaShape, select
from kda_backend.testing.cases import TOKEN_FIELDS, Case, make_case
from kda_backend.testing.steps import StepCase, StepPools
from kda_backend.testing.tolerances import ONE_HEAD, TOLERANCES
from tests.interpreter import seen_parameters
from tests.kda.calls import decode_step, prefill, recurrent, step_arguments, verify_step

ON_GPU = torch.cuda.is_available()
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 129, 257)


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
                interpreter is quick on, ``"long keys"``, narrow with a GPU's K, or ``"uneven"``,
                K and V of which neither is a power of 2.
        """
        if self.name == "kernels_128":
            model = {"key_dim": 128, "value_dim": 128} | model
        elif dims:
            model |= {
                "narrow": {"value_dim": 16},
                "long keys": {"key_dim": 128, "value_dim": 16},
                "uneven": {"key_dim": 48, "value_dim": 24},
            }[dims]
        return make_case(seed, lengths, **model).to(self.device)

    @property
    def target(self) -> Target:
        if self.name == "torch":
            return KNOWN_TARGETS["cpu"]
        return detect_target() if ON_GPU else KNOWN_TARGETS["H200"]

    def selection(self, shape: KdaShape) -> KdaSelection:
        """What the table chooses; under the interpreter, of the paths that it can run."""
        chosen = select(self.target, shape)
        if self.name == "torch" or ON_GPU:
            return chosen
        for operator in chosen.operators:
            if not all(path.name in FAMILY.interpretable for path in operator.rows):
                chosen = chosen.with_path(self._row(operator.operator.name, *FAMILY.interpretable))
        return chosen

    def selection_of(self, shape: KdaShape, operator: str, path_name: str) -> KdaSelection:
        """A selection with one named path of the table for every grid of an operator, else skip."""
        try:
            return self.selection(shape).with_path(self._row(operator, path_name))
        except StopIteration:
            pytest.skip(f"no {path_name} in the table of {self.target.arch}")

    def _row(self, operator: str, *names: str) -> Row:
        """The table's first row of an operator with one of the names."""
        rows = load_table(TABLES, self.target).rows
        return next(row for row in rows if row.operator == operator and row.name in names)

    def chunk(self, case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
        """`prefill` of a case: the functional form with states [V, K], unless overridden."""
        return prefill(**self._arguments(case, overrides))

    def recurrent(self, case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
        return recurrent(**self._arguments(case, overrides))

    def assert_same(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """The same inputs in other memory: the same bits from a kernel, while torch's own matrix
        products sum in an order that depends on strides and sizes."""
        if self.name == "torch":
            assert_close(name, got, want, 1e-6 if want.dtype == torch.float32 else 5e-3)
        else:
            assert_same_bits(name, got, want)

    def _arguments(self, case: Case, overrides: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(zip(TOKEN_FIELDS, case.tokens, strict=True)) | case.options()
        arguments["selection"] = self.selection(case.shape)
        if not overrides.keys() & {"step_plan", "cu_seqlens"}:
            arguments["cu_seqlens"] = case.cu_seqlens
        if "state_pool" not in overrides:
            arguments |= {
                "initial_state": case.state,
                "output_final_state": True,
                "state_v_first": True,
            }
        return arguments | overrides


def shipped_rows(operator: str) -> list[Any]:
    """Each distinct row of the tables that can be run here, as parameters of a test."""
    rows = {}
    for target in [detect_target()] if ON_GPU else KNOWN_TARGETS.values():
        for row in load_table(TABLES, target).rows:
            runs = row.name in FAMILY.interpretable or (ON_GPU and row.name != "torch")
            if row.operator == operator and runs:
                name = f"{target.arch}-{row.name}-{row.max_grid}"
                rows[row.name, seen_parameters(row.params)] = pytest.param(row, id=name)
    return list(rows.values())


Run = Callable[..., tuple[torch.Tensor, ...]]


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f"{name} has shape {list(got.shape)}, not {list(want.shape)}"
    error = relative_error(got.cpu(), want.cpu())
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


def spoil(scratch: Scratch) -> None:
    """Make every byte of the scratch memory part of a NaN, but for the kernels' own flags."""
    flags = scratch.flags()
    for buffer in vars(scratch).values():
        if isinstance(buffer, torch.Tensor) and buffer is not flags:
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


def run_step(
    backend: Backend, case: StepCase, pools: StepPools, indices: list[int], **overrides: Any
) -> torch.Tensor:
    device = case.packed.device
    table = torch.tensor(indices, dtype=torch.int32, device=device)
    selection = backend.selection(case.shape)
    pool = {"state_pool": pools.states, "state_indices": table, "selection": selection}
    return decode_step(**(step_arguments(case, pools.windows) | pool | overrides))


def run_verify(
    backend: Backend, case: StepCase, pools: StepPools, indices: torch.Tensor, **overrides: Any
) -> torch.Tensor:
    selection = backend.selection(case.shape)
    pool = {"state_pool": pools.states, "state_indices": indices, "selection": selection}
    return verify_step(**(step_arguments(case, pools.windows) | pool | overrides))
