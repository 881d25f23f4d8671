"""The waves of a workgroup between its barriers, and the workgroups of a launch."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tools.amdgcn.errors import DeadlockError
from tools.amdgcn.isa import steps_of
from tools.amdgcn.memory import GlobalMemory, Lds
from tools.amdgcn.program import Program
from tools.amdgcn.wave import END, LANES, Wave


@dataclass
class Kernel:
    """A program made ready to run.

    Attributes:
        num_waves: of a workgroup. lds_bytes: of a workgroup.
        counts: for each instruction how often a wave has run it, over all launches.
        unwaited_reads: how often a wave read what another one had stored before a barrier without
            waiting for the store, which is legal within a workgroup (``memory``).
    """

    program: Program
    num_waves: int
    lds_bytes: int
    counts: list[int] = field(init=False)
    unwaited_reads: int = 0

    def __post_init__(self) -> None:
        self.steps = steps_of(self.program)
        self.counts = [0] * len(self.steps)

    def launch(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[int | float | bool],
        memory: GlobalMemory,
        seed: int = 0,
    ) -> None:
        """Run every workgroup; tensors are addresses in ``memory``, hidden arguments are zero."""
        block = self._argument_block(grid, arguments)
        address = memory.add(block, "the arguments", tracked=False)
        order = random.Random(seed)
        with np.errstate(all="ignore"):
            for number in range(grid[0] * grid[1] * grid[2]):
                x, rest = number % grid[0], number // grid[0]
                place = (x, rest % grid[1], rest // grid[1])
                workgroup = Workgroup(self, number, place, memory, address)
                workgroup.run(order)
                self.unwaited_reads += workgroup.unwaited_reads

    def _argument_block(
        self, grid: tuple[int, int, int], arguments: Sequence[int | float | bool]
    ) -> np.ndarray:
        """The kernel argument segment. Pointers of scratch that Triton adds are null."""
        block = np.zeros(self.program.argument_bytes, np.uint8)
        hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid, strict=True)}
        hidden |= {f"hidden_group_size_{axis}": 1 for axis in "yz"}
        hidden["hidden_group_size_x"] = 64 * self.num_waves
        given = iter(arguments)
        for place in self.program.arguments:
            if place.kind.startswith("hidden_"):
                value: int | float | bool = hidden.get(place.kind, 0)
            else:
                value = next(given, 0)
            code = "f" if isinstance(value, float) else {1: "B", 2: "H", 4: "i", 8: "q"}[place.size]
            data = struct.pack(f"<{code}", value)
            block[place.offset : place.offset + place.size] = np.frombuffer(data, np.uint8)
        if next(given, None) is not None:
            raise ValueError(f"{self.program.name} takes fewer than {len(arguments)} arguments")
        return block

    def opcodes(self) -> Counter[str]:
        """Instructions run, by operation."""
        found: Counter[str] = Counter()
        for step, count in zip(self.steps, self.counts, strict=True):
            if count:
                found[step.instruction.operation] += count
        return found


class Workgroup:
    """Waves that share LDS and barriers.

    Attributes:
        time: barriers that all waves have passed.
    """

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        place: tuple[int, int, int],
        memory: GlobalMemory,
        arguments: int,
    ) -> None:
        self.kernel, self.number, self.memory = kernel, number, memory
        self.name = f"{kernel.program.name} on {kernel.program.arch}"
        self.lds = Lds(kernel.lds_bytes)
        self.scratch_words = -(-kernel.program.scratch_bytes // 4)
        self.time = 0
        self.unwaited_reads = 0
        self.waves = [Wave(self, n) for n in range(kernel.num_waves)]
        for wave in self.waves:
            wave.u[0] = LANES + 64 * wave.number
            wave.set_s64(0, arguments)
            for at, axis in enumerate(kernel.program.axes, kernel.program.user_sgprs):
                wave.s[at] = place[axis]

    def identity(self, wave: Wave) -> int:
        return 64 * self.number + wave.number

    def run(self, order: random.Random) -> None:
        """Between two barriers the waves run one after another, in an order drawn anew each time:
        what depends on the order, the trackers of memory report."""
        kernel = self.kernel
        while True:
            waves = order.sample(self.waves, len(self.waves))
            signals = [wave.run(kernel.steps, kernel.counts) for wave in waves]
            if all(signal == END for signal in signals):
                return
            pairs = zip(waves, signals, strict=True)
            places = {wave.pc if signal != END else -1 for wave, signal in pairs}
            if len(places) > 1:
                self._refuse(places)
            self.time += 1
            for wave in self.waves:
                self._carry_over(wave)

    def _carry_over(self, wave: Wave) -> None:
        for counter, is_ordered in (("lgkmcnt", False), ("vmcnt", True)):
            for operation in wave.flights[counter].operations:
                for access in operation.accesses:
                    access.tracker.carry_over(wave, access, is_ordered)

    def _refuse(self, places: set[int]) -> None:
        steps = self.kernel.steps
        where = sorted(
            "has ended" if at < 0 else f"waits at {steps[at - 1].instruction.source}, number {at}"
            for at in places
        )
        waits = "; another ".join(where)
        raise DeadlockError(f"{self.name}, workgroup {self.number}: one wave {waits}")
