"""In which order Hopper's machine code passes barriers: checked on every path of its branches.

``python -m tools.cuda_on_host.machine_order [FOLDER [WORD]]`` compiles the warp-specialised
kernels, or those of FOLDER with WORD in their name, and prints as JSON which rules they break.
Triton's interpreter must be off, so tests do this in another process.

What is asked of the ring of sparse MLA, with "before" meaning on every path:

- a wait for ``empty`` before anything is stored, and again after each arrival at ``full``;
- a meeting of all fetching warps between a store and the arrival at ``full``, by one of them;
- a wait for ``full`` before anything is read, and again after each arrival at ``empty``;
- a meeting of all computing warps between a read and the arrival at ``empty``.

Of every kernel, that nothing is stored where a barrier lies, and that all warps meet between the
stores and the reads of what starts the roles, their numbers and their arguments: a store and a read
that have the same number of such meetings before them may happen at once. Of block-sparse attention
of packed sequences, that values are stored where they were loaded, and that a warpgroup's product
comes after its own fence and meeting. The phase that a wait asks for is not looked at.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import triton

SOURCES = {
    package: Path(__file__).parents[2] / package / "kernels" / "sm90"
    for package in ("mla_backend", "block_sparse_backend")
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LABEL = re.compile(r"^(\.L_x_\d+):")
_LINE = re.compile(r'^\s*//## File ".*", line (\d+)')
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_PLACE = re.compile(r"\[[^\]]*?\+?(0x[0-9a-f]+)\]")


class Instruction(NamedTuple):
    """``place``: the constant part of its address."""

    line: int
    predicate: str | None
    opcode: str
    operands: str
    place: int


class Code:
    """The instructions of a kernel, and which may follow which."""

    def __init__(self, text: str) -> None:
        """``text``: of ``nvdisasm -g -c``."""
        self.all: list[Instruction] = []
        labels: dict[str, int] = {}
        line = 0
        for row in text.splitlines():
            if found := _LABEL.match(row):
                labels[found[1]] = len(self.all)
            elif found := _LINE.match(row):
                line = int(found[1])
            elif found := _INSTRUCTION.match(row):
                place = _PLACE.search(found[4])
                at = int(place[1], 16) if place else 0
                self.all.append(Instruction(line, found[2], found[3], found[4], at))
        self.after = [self._after(i, labels) for i in range(len(self.all))]

    def _after(self, i: int, labels: dict[str, int]) -> list[int]:
        x = self.all[i]
        name = x.opcode.split(".")[0]
        target = re.search(r"`\((\.L_x_\d+)\)", x.operands)
        assert name not in ("JMP", "JMX", "CALL", "RET"), f"cannot follow {x}"
        assert target is None or name in ("BRA", "BSSY"), f"cannot follow {x}"
        follows = [i + 1] if i + 1 < len(self.all) else []
        if name == "BRX":  # a table, by which warps find their role
            table = x.operands.split("BRANCH_TARGETS")[1]
            return [labels[to] for to in re.findall(r"\.L_x_\d+", table)]
        if name == "EXIT" and x.predicate is None:
            return []
        if name == "BRA":
            assert target is not None
            to = labels[target[1]]
            is_certain = x.predicate is None and x.opcode == "BRA"
            return [to] if is_certain else [*follows, to]
        if name == "BSYNC":  # to where the last BSSY around it says
            for y in reversed(self.all[:i]):
                if y.opcode == "BSSY" and y.operands.startswith(x.operands + ","):
                    end = labels[y.operands.split("`(")[1].rstrip(")")]
                    if end > i:
                        return [end]
            raise AssertionError(f"no BSSY around {x}")
        return follows

    def where(self, test: Callable[[Instruction], bool]) -> set[int]:
        return {i for i, x in enumerate(self.all) if test(x)}

    def reaches(self, begin: Iterable[int], goal: set[int], without: set[int]) -> bool:
        """Is there a way from behind one of ``begin`` (-1: the entry) to ``goal`` that passes none
        of ``without``?"""
        todo = [j for i in begin for j in ([0] if i < 0 else self.after[i])]
        seen: set[int] = set()
        while todo:
            i = todo.pop()
            if i in seen or i in without:
                continue
            if i in goal:
                return True
            seen.add(i)
            todo += self.after[i]
        return False

    def passed(self, counted: set[int], most: int = 8) -> list[set[int]]:
        """For each instruction how many of ``counted`` may have been passed before it, up to
        ``most``. One with a predicate counts where the next branch on that predicate is taken."""
        found: list[set[int]] = [set() for _ in self.all]
        todo: list[tuple[int, int, str | None]] = [(0, 0, None)]  # what is known to hold
        seen: set[tuple[int, int, str | None]] = set()
        while todo:
            state = todo.pop()
            i, count, holds = state
            if state in seen or count > most:
                continue
            seen.add(state)
            found[i].add(count)
            x, after = self.all[i], self.after[i]
            either = [holds]
            if i in counted and x.predicate and not _known(holds, x.predicate):
                either = [x.predicate, _not(x.predicate)]
            for now in either:
                if x.predicate and x.opcode == "BRA" and _known(now, x.predicate):
                    to = after[-1:] if now == x.predicate else after[:1]
                    todo += [(j, count, None) for j in to]
                    continue
                more = i in counted and (not x.predicate or now == x.predicate)
                written = now and re.match(rf"{now.lstrip('!')}\b", x.operands)
                todo += [(j, count + more, None if written else now) for j in after]
        return found


def _not(predicate: str) -> str:
    return predicate[1:] if predicate.startswith("!") else f"!{predicate}"


def _known(holds: str | None, predicate: str) -> bool:
    return holds in (predicate, _not(predicate))


def disassembled(compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "nvdisasm", "-g", "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Code(done.stdout)


def lines_of(folder: Path, text: str, least: int = 1) -> set[int]:
    """Numbers of the lines with this text, of which there are ``least`` or more: Triton takes a
    line's file for that of the kernel."""
    found = {
        number
        for file in folder.glob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if text in line
    }
    assert len(found) >= least, f"no line of {folder.name} has {text!r}"
    return found


def barriers_overlaid(code: Code) -> list[str]:
    """Is there a store of constant address to where a barrier lies?"""
    places = {x.place for x in code.all if x.opcode.startswith("SYNCS.EXCH")}
    assert places
    width = {"STS": 4, "STS.64": 8, "STS.128": 16}
    stores = [x for x in code.all if x.opcode in width and re.match(r"\[UR\d+\+", x.operands)]
    over = any(x.place < p + 8 and p < x.place + width[x.opcode] for x in stores for p in places)
    return ["a store over a barrier"] if over else []


def roles_disorder(code: Code, folder: Path, function: str) -> list[str]:
    """Faults in the order in which roles get their numbers and arguments, which Triton takes for a
    matter of the first line of the ``function`` that starts them.

    A number is a byte, those of the first four warps are not used, and when all roles have ended
    the number of the end is stored over them.
    """
    lines = lines_of(folder, f"def {function}(")
    meetings = code.passed(
        code.where(lambda x: x.opcode.startswith("BAR.SYNC") and x.operands == "0x1")
    )

    def times(group: set[int]) -> set[int]:
        return {count for i in group for count in meetings[i]}

    reads = code.where(lambda x: x.opcode == "LDS.U8")
    (place,) = {code.all[i].place for i in reads}
    numbers = code.where(lambda x: x.opcode.startswith("STS") and place + 4 <= x.place < place + 12)
    arguments = code.where(lambda x: x.line in lines and x.opcode.startswith("STS")) - numbers
    taken = code.where(lambda x: x.line in lines and x.opcode.startswith("LDS")) - reads
    assert len(times(numbers)) == 2
    assert bool(arguments) == bool(taken)  # sparse MLA's roles have those of the kernel
    found = []
    if times(numbers) & times(reads):
        found.append("a role's number is stored and read at once")
    if times(arguments) & times(taken):
        found.append("arguments are stored and read at once")
    return found


def cleared_disorder(code: Code, folder: Path) -> list[str]:
    """Faults in how packed sequences' values beyond the end are set to zero, which both
    warpgroups do in no order: each has to store where it loaded, and before its own product."""
    loads = lines_of(folder, "b_v = rows.load(layout)")
    stores = lines_of(folder, "rows.store(gl.where((16 * i + o_n < count)")
    loaded = code.where(lambda x: x.line in loads and x.opcode.startswith("LDS"))
    stored = code.where(lambda x: x.line in stores and x.opcode.startswith("STS"))
    assert stored

    def widths(group: set[int]) -> set[str]:
        return {code.all[i].opcode[3:] for i in group}

    def addresses(group: set[int]) -> list[str]:
        return [re.findall(r"\[.*?\]", code.all[i].operands)[0] for i in sorted(group)]

    found = []
    if widths(loaded) != widths(stored) or addresses(loaded) != addresses(stored):
        found.append("values are not stored where they were loaded")
    fences = lines_of(folder, "    fence_async_shared()", least=0)
    fence = code.where(lambda x: x.line in fences and x.opcode.startswith("FENCE.VIEW.ASYNC"))
    meeting = code.where(
        lambda x: x.opcode.startswith("BAR.SYNC") and x.operands.endswith(", 0x80")
    )
    product = code.where(lambda x: x.opcode.startswith("HGMMA"))
    free = code.where(lambda x: x.opcode.startswith("SYNCS.ARRIVE"))
    rules = [
        ("a product before the fence of what it reads", stored, product, fence),
        ("a product before the warpgroup has stored", fence, product, meeting),
        ("a stage freed before the warpgroup has stored", stored, free, meeting),
    ]
    return found + [
        what for what, begin, goal, without in rules if code.reaches(begin, goal, without)
    ]


def ring_disorder(
    code: Code, folder: Path, stages: int, fetching: int, computing: int
) -> list[str]:
    """Faults in the order of sparse MLA's ring; both counts are of threads."""

    def at_lines(text: str, *opcodes: str) -> set[int]:
        lines = lines_of(folder, text)
        return code.where(lambda x: x.line in lines and x.opcode.startswith(opcodes))

    def places(name: str) -> set[int]:
        lines = lines_of(folder, f"mbarrier.init({name}.index")
        found = {x.place for x in code.all if x.line in lines and x.opcode.startswith("SYNCS.EXCH")}
        assert len(found) == stages, f"{name} has barriers at {found}"
        return found

    full, empty = places("full"), places("empty")

    def of(barriers: set[int], opcode: str) -> set[int]:
        return code.where(lambda x: x.place in barriers and x.opcode.startswith(opcode))

    def meeting(threads: int) -> set[int]:
        pattern = re.compile(rf"0x\w+, {threads:#x}$")
        return code.where(
            lambda x: x.opcode.startswith("BAR.SYNC") and bool(pattern.match(x.operands))
        )

    waits, arrivals = "SYNCS.PHASECHK", "SYNCS.ARRIVE"
    assert of(full, arrivals) and of(empty, arrivals)
    shown = at_lines("seen_s.index(stage).s", "STS")  # store(, slice(
    read = at_lines("b_seen = seen_s.index(stage).load(", "LDS")
    assert shown and read
    first = {min(code.all[i].place for i in group) for group in (shown, read)}
    assert len(first) == 1, "not one buffer"
    stored = shown | code.where(lambda x: x.opcode.startswith("LDGSTS"))
    products = code.where(lambda x: x.opcode.startswith("HGMMA"))
    rules = [
        ("a store does not wait for empty", {-1}, stored, of(empty, waits)),
        ("a store after full does not wait", of(full, arrivals), stored, of(empty, waits)),
        ("full before all have stored", shown, of(full, arrivals), meeting(fetching)),
        ("a read does not wait for full", {-1}, read | products, of(full, waits)),
        ("a read after empty does not wait", of(empty, arrivals), read | products, of(full, waits)),
        ("empty before all have read", read | products, of(empty, arrivals), meeting(computing)),
    ]
    return [what for what, begin, goal, without in rules if code.reaches(begin, goal, without)]


def report(package: str = "", folder: str = "", word: str = "") -> dict[str, list[str]]:
    """The faults of each kernel with this word in its name; ``folder`` is taken for the sources of
    ``package``, if there is one."""
    folders = SOURCES | ({package: Path(folder)} if package else {})
    for name, place in folders.items():
        importlib.import_module(f"{name}.kernels.sm90").__path__ = [str(place)]
    from block_sparse_backend import masks
    from mla_backend.kernels.sm90.sparse_mla_compute import STAGES
    from tests.block_sparse import compile_report as block_sparse
    from tests.mla import compile_report as sparse_mla

    found = {}
    folder_of_mla, folder_of_blocks = folders["mla_backend"], folders["block_sparse_backend"]
    for case in sparse_mla.gluon_cases():
        name, launch, _ = case
        if name in found or word not in name or not re.search("split|rows", name):
            continue
        constants = launch._kwargs
        code = disassembled(sparse_mla.build_gluon(case))
        warps = constants["FETCH_WARPS"], constants["WARPS"]
        fetching, computing = (32 * count for count in warps)
        found[name] = barriers_overlaid(code)
        found[name] += roles_disorder(code, folder_of_mla, launch.kernel.__name__)
        found[name] += ring_disorder(code, folder_of_mla, STAGES.value, fetching, computing)
    for is_packed in (False, True):
        name = f"block_sparse gluon{' packed' if is_packed else ''}"
        if word in name:
            code = disassembled(block_sparse.build_gluon(128, 2, masks.causal, is_packed))
            found[name] = barriers_overlaid(code) + roles_disorder(code, folder_of_blocks, "_run")
            if is_packed:
                found[name] += cleared_disorder(code, folder_of_blocks)
    return found


if __name__ == "__main__":
    print(json.dumps(report(*sys.argv[1:])))
