"""Compile the repository's CUDA kernels with nvcc, for a GPU that is not there."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from backend_core.launch.cuda import HEADERS, PARAMS_HEADER, CudaParams, shared_bytes_of

NVCC = shutil.which("nvcc")


def nvcc_version() -> str:
    out = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", out)[1]  # type: ignore[index]


def compile_cubin(
    source: Path, params: CudaParams, defines: Mapping[str, int]
) -> tuple[bytes, dict[str, int]]:
    """(cubin; registers, spilled bytes, serialised wgmma and dynamic shared memory in bytes)."""
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
