"""In which order Hopper's machine code passes barriers: checked on every path of its branches.

``python -m tests.softmax.machine_order [FOLDER [WORD]]`` compiles the warp-specialised kernels, or
those of FOLDER in their place and with WORD in their name, and prints as JSON what is out of order.
Triton's interpreter must be off, so tests do this in another process.

What is asked of the ring of sparse MLA, with "before" meaning on every path:

- a wait for ``empty`` before anything is stored, and again after each arrival at ``full``;
- a meeting of all fetching warps between a store and the arrival at ``full``, by one of them;
- a wait for ``full`` before anything is read, and again after each arrival at ``empty``;
- a meeting of all computing warps between a read and the arrival at ``empty``.

Of block-sparse attention, that a role's arguments are stored before a meeting of all warps and read
after it; of every kernel, that nothing is stored where a barrier lies. The phase that a wait asks
for is not looked at.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import triton

SOURCES = Path(__file__).parents[2] / "softmax_backend" / "kernels" / "sm90"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PERSISTENT = "block_sparse_persistent_sm90_kernel"
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


def disassembled(compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "nvdisasm", "-g", "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Code(done.stdout)


def lines_of(folder: Path, text: str) -> set[int]:
    """Numbers of the lines with this text: Triton takes a line's file for that of the kernel."""
    found = {
        number
        for file in folder.glob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if text in line
    }
    assert found, f"no line of {folder.name} has {text!r}"
    return found


def barriers_overlaid(code: Code) -> list[str]:
    """Is there a store of constant address to where a barrier lies?"""
    places = {x.place for x in code.all if x.opcode.startswith("SYNCS.EXCH")}
    assert places
    width = {"STS": 4, "STS.64": 8, "STS.128": 16}
    stores = [x for x in code.all if x.opcode in width and re.match(r"\[UR\d+\+", x.operands)]
    over = any(x.place < p + 8 and p < x.place + width[x.opcode] for x in stores for p in places)
    return ["a store over a barrier"] if over else []


def arguments_disorder(code: Code, folder: Path, function: str) -> list[str]:
    """What is out of order in how block-sparse attention's roles get their arguments, which Triton
    takes for a matter of the first line of the ``function`` that starts them."""
    lines = lines_of(folder, f"def {function}(")
    stored = code.where(lambda x: x.line in lines and x.opcode.startswith("STS"))
    read = code.where(lambda x: x.line in lines and x.opcode.startswith("LDS"))
    meeting = code.where(lambda x: x.opcode.startswith("BAR.SYNC") and x.operands == "0x1")
    assert stored and code.reaches({-1}, read, set())
    rules = [
        ("arguments read before warps have met", {-1}, read, meeting),
        ("arguments stored after warps have met", meeting, stored, set()),
    ]
    return [what for what, begin, goal, without in rules if code.reaches(begin, goal, without)]


def ring_disorder(
    code: Code, folder: Path, stages: int, fetching: int, computing: int
) -> list[str]:
    """What is out of order in sparse MLA's ring; both counts are of threads."""

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


def report(folder: Path, word: str = "") -> dict[str, list[str]]:
    """What is out of order in each kernel with this word in its name, of the folder's sources."""
    import softmax_backend.kernels.sm90 as package

    package.__path__ = [str(folder)]
    from softmax_backend.variants import masks
    from tests.softmax import compile_report as sparse_mla
    from tests.softmax.prefill import compile_report as block_sparse

    found = {}
    for case in sparse_mla.gluon_cases():
        name, launch, _ = case
        if name in found or word not in name or not re.search("split|rows", name):
            continue
        constants = launch._kwargs
        code = disassembled(sparse_mla.build_gluon(case))
        warps = constants["FETCH_WARPS"], constants["WARPS"]
        fetching, computing = (32 * count for count in warps)
        found[name] = barriers_overlaid(code)
        found[name] += ring_disorder(code, folder, constants["STAGES"], fetching, computing)
    for form in block_sparse.GLUON:
        for ping_pong in (False, True):
            name = f"block_sparse {form}{', in turns' * ping_pong}"
            if word in name:
                turns = "ping_pong" if ping_pong else ""
                kernel = block_sparse.build_gluon(128, 2, masks.causal, form, form=turns)
                code = disassembled(kernel)
                starts = "_run" if "persistent" not in form else PERSISTENT
                found[name] = barriers_overlaid(code) + arguments_disorder(code, folder, starts)
    return found


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES, *sys.argv[2:])))
