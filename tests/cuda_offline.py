"""Compile the repository's CUDA kernels with nvcc, for a GPU that is not there."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from backend_core.launch.cuda import HEADERS, PARAMS_HEADER, shared_bytes_of
from backend_core.launch.cuda_params import CudaParams
from tests.offline import kept

NVCC = shutil.which("nvcc")


@functools.cache
def _nvcc() -> str:
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout


def nvcc_version() -> str:
    return re.search(r"release ([\d.]+)", _nvcc())[1]  # type: ignore[index]


def compile_cubin(
    source: Path, params: CudaParams, defines: Mapping[str, int]
) -> tuple[bytes, dict[str, int]]:
    """(cubin; registers, spilled bytes, serialised wgmma and dynamic shared memory in bytes)."""
    files = [*sorted(source.parent.glob("*.cu*")), *sorted(HEADERS.glob("*.cu*")), Path(__file__)]
    texts = [source.name, params.header, *(file.read_text() for file in files)]
    made_of = json.dumps([_nvcc(), texts, dict(defines)])
    place = kept("nvcc") / hashlib.sha256(made_of.encode()).hexdigest()
    if not place.exists():
        image, line = _compile(source, params, defines)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as unfinished:
            unfinished.write(json.dumps(line).encode() + b"\n" + image)
        Path(unfinished.name).rename(place)
    line_as_text, _, image = place.read_bytes().partition(b"\n")
    return image, json.loads(line_as_text)


def _compile(
    source: Path, params: CudaParams, defines: Mapping[str, int]
) -> tuple[bytes, dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, PARAMS_HEADER).write_text(params.header)
        cubin = Path(folder, "kernel.cubin")
        command = [
            *("nvcc", "-cubin", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"),
            *("-Xptxas", "-v", "-I", folder, "-I", str(HEADERS), "-o", str(cubin)),
            *(f"-D{name}={value}" for name, value in defines.items()),
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        image = cubin.read_bytes()
    return image, {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),  # type: ignore[index]
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr))),
        # ptxas runs wgmma one by one where it cannot follow the accumulators
        "serialised_wgmma": done.stderr.count("instructions are serialized"),
        "shared_bytes": shared_bytes_of(image),
    }
