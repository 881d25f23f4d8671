"""From ``amdgcn`` text to instructions, labels and the layout of the kernel's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tools.amdgcn.errors import UnmodelledError

_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)$")
_INSTRUCTION = re.compile(r"(?:s|v|ds|global|buffer|flat|scratch)_\w+")
_COMMA = re.compile(r",\s*(?![^\[]*\])(?![^(]*\))")
_LOCATION = re.compile(r"\.loc\s.*;\s*([\w.]+:\d+)")
_REFUSED = {
    "uses_dynamic_stack": "uses a stack of unknown size",
    "tg_split": "lets the waves of a workgroup run on different compute units, with an L1 each",
}
"""Settings of a kernel that are not modelled; the trackers of memory rely on the second."""


@dataclass(frozen=True)
class Instruction:
    """One line of the program.

    Attributes:
        operation: the name without the suffix of its encoding, such as ``v_add_f32``.
        encoding: ``"e32"``, ``"e64"``, ``"dpp"``, ``"sdwa"`` or ``""``.
        modifiers: what follows the operands: ``{"offset": "16", "offen": ""}``.
        source: the line of Python that it was compiled from, ``"scan.py:97"``, where it is known.
    """

    operation: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str]
    text: str
    source: str


@dataclass(frozen=True)
class Argument:
    """Place and size in bytes, and what it is: ``"global_buffer"``, ``"by_value"``, or one of the
    hidden ones, which come after those of the kernel's signature."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Program:
    """One kernel.

    Attributes:
        labels: label to the index of the instruction after it.
        arguments: where each argument lies in the kernel argument segment.
        argument_bytes: size of that segment.
        user_sgprs: scalar registers that are set before the workgroup's place in the grid.
        axes: of the grid, those whose place the kernel is given, in the order of its registers.
        scratch_bytes: private memory of each lane, where registers are spilled.
    """

    name: str
    arch: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    arguments: tuple[Argument, ...]
    argument_bytes: int
    user_sgprs: int
    axes: tuple[int, ...]
    scratch_bytes: int


def parse(text: str) -> Program:
    """The kernel of a text that holds one.

    Raises:
        UnmodelledError: a line is neither an instruction, a label nor a directive; or the kernel
            uses what the interpreter does not set up, such as a stack of unknown size.
    """
    name = _find(r"\.globl\s+(\w+)", text)
    body = text[re.search(rf"^{name}:", text, re.MULTILINE).end() :]  # type: ignore[union-attr]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for raw in body.split(".Lfunc_end0:")[0].split("\n"):
        if found := _LOCATION.search(raw):
            source = found.group(1)
        line = raw.split(";")[0].strip()
        if not line:
            continue
        if label := re.fullmatch(r"([.\w]+):", line):
            labels[label.group(1)] = len(instructions)
        elif _INSTRUCTION.match(line):
            instructions.append(_instruction(line, source))
        elif not line.startswith("."):
            raise UnmodelledError(f"{name}: not an instruction: {line}")
    for setting, why in _REFUSED.items():
        if f".amdhsa_{setting} 1" in text:
            raise UnmodelledError(f"{name} {why}")
    found_arguments = re.findall(
        r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", text
    )
    return Program(
        name,
        _find(r"amdgcn_target \"amdgcn-amd-amdhsa--(\w+)", text),
        tuple(instructions),
        labels,
        tuple(Argument(int(offset), int(size), kind) for offset, size, kind in found_arguments),
        int(_find(r"\.kernarg_segment_size:\s+(\d+)", text)),
        int(_find(r"\.amdhsa_user_sgpr_count (\d+)", text)),
        tuple(n for n, axis in enumerate("xyz") if f"workgroup_id_{axis} 1" in text),
        int(_find(r"\.private_segment_fixed_size:\s+(\d+)", text)),
    )


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise UnmodelledError(f"the text has no {pattern}")
    return found.group(1)


def _instruction(line: str, source: str) -> Instruction:
    name, _, rest = line.partition(" ")
    if "\t" in name:
        name, _, rest = line.partition("\t")
    found = _ENCODING.search(name)
    encoding = found.group(1) if found else ""
    operation = _ENCODING.sub("", name)
    rest = rest.strip()
    if operation == "s_waitcnt":
        counters = dict(re.findall(r"(\w+)\((\d+)\)", rest))
        return Instruction(operation, encoding, (), counters, line, source)
    parts = [part.strip() for part in _COMMA.split(rest)] if rest else []
    modifiers: dict[str, str] = {}
    if parts:
        # modifiers follow the last operand, each after a space
        parts[-1], *following = parts[-1].split()
        for word in following:
            key, _, value = word.partition(":")
            modifiers[key] = value
    return Instruction(operation, encoding, tuple(parts), modifiers, line, source)
