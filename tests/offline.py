"""Compile Triton kernels for GPUs that are not there, and read what the compiler made of them.

Triton's interpreter must be off, so tests do this in another process (``report_of``).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from backend_core.launch.head import grouped, parts_of
from backend_core.launch.triton import OPTIONS
from backend_core.target import KNOWN_TARGETS, Target

ROOT = Path(__file__).parents[1]
TARGETS: dict[str, tuple[GPUTarget, Target]] = {
    target.arch: (
        GPUTarget("cuda", int(target.arch[2:]), 32)
        if target.vendor == "nvidia"
        else GPUTarget("hip", target.arch, 64),
        target,
    )
    for target in KNOWN_TARGETS.values()
    if target.vendor != "cpu"
}
"""Architecture to the compiler's target and the part that stands for it."""
SHARED_LIMIT = {
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm103": 227 << 10,
    "sm120": 99 << 10,
    "sm121": 99 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
"""Shared memory that one program may use, in bytes."""
ALL = bool(os.environ.get("KDA_TEST_ALL_TARGETS"))
OTHERS = ("sm100", "gfx942", "gfx950")
IN_TURN = ("kda", "dsv4", "block_sparse")
Report = dict[str, dict[str, int]]


def compiled_again(family: str) -> tuple[str, ...]:
    """Architectures for which a family's tests compile again what its committed report holds: all
    with ``KDA_TEST_ALL_TARGETS``, else Hopper and, where the family's day has come, one other."""
    day = datetime.date.today().toordinal()
    if ALL:
        return tuple(TARGETS)
    turn = IN_TURN[day % len(IN_TURN)] == family
    return ("sm90", OTHERS[day // len(IN_TURN) % len(OTHERS)]) if turn else ("sm90",)


def source_of(
    kernel: Any,
    types: Mapping[str, str],
    constexprs: Mapping[str, Any],
    attrs: Mapping[str, list[list[Any]]],
) -> ASTSource:
    """A variant of a kernel as Triton compiles it.

    Args:
        types, constexprs: as `compile_kernel` takes them.
        attrs: Triton's attributes of run-time arguments.
    """
    parts = parts_of(kernel)
    places = {
        name: (i,) if part.group is None else (i, j)
        for i, part in enumerate(parts)
        for j, name in enumerate(part.names)
    }
    kinds = ["constexpr" if name in constexprs else types[name] for name in places]
    return ASTSource(
        kernel,
        dict(zip(kernel.arg_names, grouped(parts, kinds), strict=True)),
        constexprs={places[name]: value for name, value in constexprs.items()},
        attrs={places[name]: values for name, values in attrs.items()},
    )


def compile_kernel(
    arch: str,
    kernel: Any,
    types: Mapping[str, str],
    constexprs: Mapping[str, Any],
    options: Mapping[str, Any],
    aligned: frozenset[str],
) -> dict[str, int]:
    """Build one variant and measure it.

    Args:
        types: Triton type of each run-time argument, such as ``*fp32`` or ``i32``.
        constexprs: value of each other argument: the constexprs, ``None`` for an absent pointer, 1
            for an int that Triton folds.
        options: ``num_warps``, ``num_stages``.
        aligned: run-time arguments that are a multiple of 16 (pointers: bytes). On HIP pointers are
            taken to be within 2 GiB, for which buffer instructions are used.
    """
    target, _ = TARGETS[arch]
    attrs = {}
    for name, kind in types.items():
        attrs[name] = [["tt.divisibility", 16]] if name in aligned else []
        if target.backend == "hip" and kind.startswith("*"):
            attrs[name].append(["tt.pointer_range", 32])
    source = source_of(kernel, types, constexprs, attrs)
    compiled = triton.compile(source, target=target, options={**OPTIONS, **options})
    return measure(compiled)


def measure(compiled: Any) -> dict[str, int]:
    """What a compiled kernel takes, read from its machine code and the compiler's notes.

    ``spills`` are instructions on memory for registers that did not fit. Triton's nvdisasm knows
    sm_103 and sm_121 not at all: instructions are not counted there, and ``spills`` are the bytes
    of the stack.
    """
    manager = get_cache_manager(compiled.hash)  # where Triton keeps the kernel
    name = f"measured-{_OF_THIS_FILE}.json"
    if (known := manager.get_file(name)) is not None:
        line: dict[str, int] = json.loads(Path(known).read_text())
        return line
    read = _measure_amd if "amdgcn" in compiled.asm else _measure_nvidia
    line = {**read(compiled), "shared": compiled.metadata.shared}
    manager.put(json.dumps(line), name)
    return line


_OF_THIS_FILE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def _measure_amd(compiled: Any) -> dict[str, int]:
    text = compiled.asm["amdgcn"]
    body = re.split(r"^\s+\.section\s+\.rodata|\.Lfunc_end0", text, flags=re.MULTILINE)[0]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None
        return int(found.group(1))

    return {
        "registers": field("vgpr_count"),
        "spills": field("vgpr_spill_count"),
        "scalar_spills": field("sgpr_spill_count"),
        "stack": field("private_segment_fixed_size"),
        "mma": _count(r"^\s+v_mfma", body),
        "barriers": _count(r"^\s+s_barrier", body),
        "loads": _count(r"^\s+(global|buffer|flat)_load", body),
        "stores": _count(r"^\s+(global|buffer|flat)_store", body),
        "instructions": _count(r"^\s+[a-z]\w+_\w+", body),
    }


def _measure_nvidia(compiled: Any) -> dict[str, int]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "-res-usage", file.name)
        sass = _run(tools / "nvdisasm", "-ndf", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None
    registers, stack, local = (int(group) for group in found.groups())
    line = {
        "registers": registers,
        "spills": _count(r"\bLDL|\bSTL", sass),
        "scalar_spills": 0,
        "stack": stack + local,
    }
    if "Cannot decode architecture" in sass:
        return line | {"spills": line["stack"]}
    return line | {
        "mma": _count(r"\b[HQ]G?MMA|\bUTC\w*MMA", sass),
        "barriers": _count(r"\bBAR\.", sass),
        "loads": _count(r"\bLDG", sass),
        "stores": _count(r"\bSTG", sass),
        "instructions": _count(r"/\*[0-9a-f]{4,5}\*/\s", sass),
    }


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.MULTILINE))


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    return done.stdout + done.stderr


def dump(reports: Mapping[str, Report]) -> str:
    """The committed form: one line a kernel, so that a difference can be read."""
    parts = [
        '  "source": "offline compilation"',
        f'  "triton": {json.dumps(triton.__version__)}',
    ]
    for arch, lines in reports.items():
        rows = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in lines.items())
        parts.append(f"  {json.dumps(arch)}: {{\n{rows}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def kept(compiler: str) -> Path:
    """Where a compiler keeps what tests have had compiled: again it makes only what has changed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kda-dsv4" / "compiled" / compiler


def report_of(module: str, arch: str, cache: Path | None = None) -> Report:
    """``python -m module arch`` in a process of its own, without the interpreter."""
    cache = cache or kept(f"triton-{triton.__version__}")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, arch],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: Report = json.loads(done.stdout)
    return report
