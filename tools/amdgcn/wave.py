"""One wave: its registers, what it has in flight, and the loop that runs its instructions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.amdgcn.errors import DeadlockError, ExecutionError, HazardError
from tools.amdgcn.operands import ACC, EXEC, SCALAR
from tools.amdgcn.program import Instruction

if TYPE_CHECKING:
    from tools.amdgcn.memory import Access
    from tools.amdgcn.workgroup import Workgroup

LANES = np.arange(64)
ALL = 2**64 - 1
CAPACITY = {"vmcnt": 63, "lgkmcnt": 15}
"""Operations that each counter can hold."""
BARRIER, END = "barrier", "end"
LIMIT = 5_000_000
"""Instructions between two barriers after which a wave is taken to run for ever."""
HISTORY = 6
"""Instructions that a wave remembers: the longest wait that a hazard asks for, and itself."""


@lru_cache(maxsize=4096)
def lanes_of(bits: int) -> np.ndarray:
    """The 64 bits of a mask as booleans."""
    packed = np.frombuffer(bits.to_bytes(8, "little"), np.uint8)
    lanes: np.ndarray = np.unpackbits(packed, bitorder="little").view(np.bool_)
    lanes.flags.writeable = False
    return lanes


def bits_of(lanes: np.ndarray) -> int:
    """64 booleans as the bits of a mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


@dataclass(frozen=True)
class Step:
    """An instruction made ready.

    Attributes:
        run: what it does to a wave; returns ``BARRIER``, ``END`` or ``None``.
        touched: registers that it reads or writes, in the numbering that both kinds share.
        written: of these, the ones that a vector instruction writes, for wait states.
        loads: registers that it loads: writing one that is in flight in the same order is legal.
        wait_states: cycles that it passes beyond its own, as ``s_nop`` does.
    """

    instruction: Instruction
    run: Callable[[Wave], str | None]
    touched: frozenset[int]
    written: frozenset[int]
    wait_states: int


class InFlight:
    """Memory operations of one counter that have not been waited for, oldest first.

    Vector memory returns in order, and so does LDS. Scalar loads return in any order, so while one
    is in flight only a wait for zero says anything.
    """

    def __init__(self, counter: str) -> None:
        self.counter = counter
        self.operations: deque[Operation] = deque()

    def add(self, wave: Wave, operation: Operation) -> None:
        """A counter that is full holds the next operation back until the oldest one is done."""
        if len(self.operations) == CAPACITY[self.counter]:
            self.wait(wave, CAPACITY[self.counter] - 1)
        self.operations.append(operation)

    def wait(self, wave: Wave, count: int) -> None:
        """Retire the operations that a wait until ``count`` are left guarantees."""
        operations = self.operations
        if count and any(not operation.in_order for operation in operations):
            return
        while len(operations) > count:
            operation = operations.popleft()
            for register in operation.registers:
                if wave.pending.get(register) is operation:
                    del wave.pending[register]
            for access in operation.accesses:
                access.is_waited = True


@dataclass(eq=False)
class Operation:
    """One memory operation in flight: the registers it will write and the bytes it touches."""

    counter: str
    in_order: bool
    registers: Sequence[int]
    accesses: Sequence[Access]


class Wave:
    """Registers and counters of one wave.

    Attributes:
        u, f, i: ``[512, 64]``, the vector registers, then the AccVGPRs: three views of one memory.
        s: 128 scalar registers as ints; VCC, M0 and EXEC among them.
        scratch: ``[words, 64]``, the lanes' private memory.
        mask, full: EXEC as booleans, and whether it has every lane.
        pending: register to the operation in flight that will write it.
        number: of the wave in its workgroup.
    """

    def __init__(self, workgroup: Workgroup, number: int) -> None:
        self.workgroup, self.number = workgroup, number
        self.u = np.full((512, 64), 0x7FC0DEAD, np.uint32)  # a NaN: what is never written, shows
        self.f, self.i = self.u.view(np.float32), self.u.view(np.int32)
        self.s = [0x5EAD5EAD] * 128
        self.scratch = np.full((workgroup.scratch_words, 64), 0x7FC0DEAD, np.uint32)
        self.scc = 0
        self.pc = 0
        self.pending: dict[int, Operation] = {}
        self.flights = {name: InFlight(name) for name in ("vmcnt", "lgkmcnt")}
        self.history: deque[Step] = deque(maxlen=HISTORY)
        self.set_exec(ALL)

    def set_exec(self, value: int) -> None:
        self.s[EXEC], self.s[EXEC + 1] = value & 0xFFFFFFFF, value >> 32
        self.mask: np.ndarray = lanes_of(value)
        self.full = value == ALL

    def s64(self, index: int) -> int:
        return self.s[index] | self.s[index + 1] << 32

    def set_s64(self, index: int, value: int) -> None:
        if index == EXEC:
            self.set_exec(value)
        else:
            self.s[index], self.s[index + 1] = value & 0xFFFFFFFF, value >> 32

    def set_s32(self, index: int, value: int) -> None:
        self.s[index] = value
        if index in (EXEC, EXEC + 1):
            self.set_exec(self.s64(EXEC))

    def put(self, view: np.ndarray, row: int, value: Any) -> None:
        """Write the lanes that EXEC has; ``view`` is ``u``, ``f`` or ``i``."""
        if self.full:
            view[row] = value
        else:
            np.copyto(view[row], value, where=self.mask, casting="unsafe")

    def issue(self, operation: Operation) -> None:
        """Put an operation in flight. Its registers hold their new values but must not be used."""
        self.flights[operation.counter].add(self, operation)
        for register in operation.registers:
            self.pending[register] = operation

    def run(self, steps: Sequence[Step], counts: list[int]) -> str:
        """Run until a barrier or the end; ``counts`` says how often each step was run."""
        history = self.history
        for _ in range(LIMIT):
            at = self.pc
            step = steps[at]
            self.pc = at + 1
            counts[at] += 1
            try:
                if self.pending and not self.pending.keys().isdisjoint(step.touched):
                    self._refuse_pending(step)
                signal = step.run(self)
            except ExecutionError as error:
                raise type(error)(f"{self.place(step.instruction)}: {error}") from None
            history.append(step)
            if signal is not None:
                return signal
        raise DeadlockError(
            f"{self.place(step.instruction)}: no barrier and no end in {LIMIT} steps"
        )

    def place(self, instruction: Instruction) -> str:
        workgroup = self.workgroup
        where = f"{workgroup.name}, workgroup {workgroup.number}, wave {self.number}"
        return f"{where}, {instruction.source}, `{instruction.text}`"

    def _refuse_pending(self, step: Step) -> None:
        for register in sorted(step.touched & self.pending.keys()):
            operation = self.pending[register]
            raise HazardError(
                f"{_name(register)} is in flight and was not waited for with {operation.counter}"
            )

    def expect_wait_states(self, registers: frozenset[int], states: int, what: str) -> None:
        """Raise where a vector instruction wrote one of ``registers`` fewer than so many wait
        states ago: the GPU does not interlock what this is asked for."""
        passed = 0
        for step in reversed(self.history):
            if passed >= states:
                return
            if late := step.written & registers:
                raise HazardError(
                    f"{_name(min(late))} was written by `{step.instruction.text}` {passed} wait "
                    f"states before {what}, which needs {states}"
                )
            passed += 1 + step.wait_states


def _name(register: int) -> str:
    if register >= SCALAR:
        return f"s{register - SCALAR}"
    return f"a{register - ACC}" if register >= ACC else f"v{register}"
