"""The instructions of every kernel in the compile reports: what the shipped tables can select.

``python -m tools.amdgcn.opcodes gfx950 attention`` compiles them (Triton's interpreter must be off)
and prints a line of JSON: the family's kernels, their operations, and those that the interpreter of
this folder cannot run, each with why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tools.amdgcn.errors import UnmodelledError
from tools.amdgcn.isa import step_of
from tools.amdgcn.program import parse

ROOT = Path(__file__).parents[2]
REPORTS = {
    "kda": ("tests.kda.compile_report",),
    "dsv4": ("tests.dsv4.compile_report",),
    "attention": ("tests.mla.compile_report", "tests.block_sparse.compile_report"),
}
"""The compile reports of each family; of MLA and block-sparse attention together."""
NOT_EXECUTED = {
    "decode_split_kernel": "its workgroups meet at an atomic, which is not modelled, and no table"
    " chooses it",
}


def of_compile_reports(arch: str, family: str) -> dict[str, Any]:
    """``{"kernels": {name: compilations}, "opcodes": {operation: occurrences}, "unmodelled": {text:
    why}}``."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tools.amdgcn.opcodes", arch, family]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the compile reports of {arch} {family} failed: {done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _collect(arch: str, family: str) -> dict[str, Any]:
    import importlib

    import triton

    texts: list[str] = []
    compile_kernel = triton.compile

    def compile_and_keep(*arguments: Any, **keywords: Any) -> Any:
        compiled = compile_kernel(*arguments, **keywords)
        texts.append(compiled.asm["amdgcn"])
        return compiled

    triton.compile = compile_and_keep
    for module in REPORTS[family]:
        importlib.import_module(module).report(arch)
    return _count(texts)


def _count(texts: list[str]) -> dict[str, Any]:
    kernels: Counter[str] = Counter()
    opcodes: Counter[str] = Counter()
    unmodelled: dict[str, str] = {}
    for text in texts:
        program = parse(text)
        if program.name in NOT_EXECUTED:
            continue
        kernels[program.name] += 1
        for instruction in program.instructions:
            opcodes[instruction.operation] += 1
            try:
                step_of(instruction, program.labels, program.arch)
            except UnmodelledError as error:
                unmodelled[instruction.text] = str(error)
    return {
        "kernels": dict(sorted(kernels.items())),
        "opcodes": dict(sorted(opcodes.items())),
        "unmodelled": unmodelled,
    }


if __name__ == "__main__":
    print(json.dumps(_collect(*sys.argv[1:])))
