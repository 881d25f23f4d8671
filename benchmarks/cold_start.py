"""What a model's first start compiles on this GPU, and what a start with full caches takes.

    python -m benchmarks.cold_start OUT.json

Three processes make the kernels of Kimi-Linear's KDA layers ready as an adapter does at model
load: one whose caches of compiled kernels are empty, and twice one that finds them full, since
the first also reads them from the disk. ``triton_s`` is the time of a layer's calls, without their
comparison with float64.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from backend_core.testing.records import write_record

HEADS, DIM = 32, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.output.write_text(json.dumps(start()))
        return
    from backend_core.testing.timing import environment

    with tempfile.TemporaryDirectory() as folder:
        caches = {"XDG_CACHE_HOME": f"{folder}/xdg", "TRITON_CACHE_DIR": f"{folder}/triton"}
        starts = []
        for _ in range(3):
            file = Path(folder, "start.json")
            command = [sys.executable, "-m", "benchmarks.cold_start", str(file), "--child"]
            subprocess.run(command, env={**os.environ, **caches}, check=True)
            starts.append(json.loads(file.read_text()))
    first, cached = starts[0], starts[-1]
    report = {
        **environment(),
        "script": "benchmarks/cold_start.py",
        "cpu_threads": os.cpu_count(),
        "nvrtc_s": first["nvrtc_s"],
        "triton_s": first["triton_s"],
        "cached_s": round(cached["nvrtc_s"] + cached["triton_s"], 2),
        "kernels": sorted(first["kernels"], key=lambda kernel: -kernel["s"]),
    }
    write_record(args.output, report)
    print(json.dumps({key: x for key, x in report.items() if key != "kernels"}))


def start() -> dict[str, Any]:
    """Seconds until the CUDA kernels are loaded, and until the others are."""
    import torch

    from backend_core.launch import cuda
    from backend_core.target import detect_target
    from kda_backend import layer
    from kda_backend.prefill.arguments_sm90 import Track, variant_of_engine
    from kda_backend.prefill.paths import begin_to_compile
    from kda_backend.selection import KdaShape, select
    from kda_backend.testing import checks

    kernels: list[dict[str, Any]] = []
    made: list[cuda.CudaKernel] = []
    compile_one, make = cuda._compile, cuda.CudaKernel.__init__

    def timed(
        library: ctypes.CDLL, text: bytes, name: str, params_header: str, options: tuple[str, ...]
    ) -> bytes:
        begin = time.perf_counter()
        image = compile_one(library, text, name, params_header, options)
        flags = " ".join(option[2:] for option in options if option.startswith("-D"))
        seconds = round(time.perf_counter() - begin, 2)
        kernels.append({"name": f"{name} {flags}".strip(), "s": seconds})
        return image

    def kept(self: cuda.CudaKernel, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.append(self)

    cuda._compile = timed
    cuda.CudaKernel.__init__ = kept  # type: ignore[method-assign]
    torch.empty(1, device="cuda")  # the context is torch's own cost
    device, target = torch.device("cuda"), detect_target()
    selection = select(target, KdaShape(HEADS, HEADS, DIM, DIM))
    begin = time.perf_counter()
    tracks = (Track.NONE, Track.POOL)
    begin_to_compile(selection, [variant_of_engine(False, torch.float32, track=t) for t in tracks])
    for kernel in list(made):
        kernel.load()
    loaded, compiled_before, rest = time.perf_counter(), len(kernels), 0.0
    prefill = layer.prefill

    def timed_prefill(*args: Any, **options: Any) -> None:
        nonlocal rest
        begin = time.perf_counter()
        prefill(*args, **options)
        torch.cuda.synchronize()
        rest += time.perf_counter() - begin

    layer.prefill = timed_prefill
    for single in selection.single_paths():
        for path in dict.fromkeys(single.prefill.rows):
            checks.run_layer(path, target, device)
    later = sum(kernel["s"] for kernel in kernels[compiled_before:])
    return {
        "nvrtc_s": round(loaded - begin + later, 2),
        "triton_s": round(rest - later, 2),
        "kernels": kernels,
    }


if __name__ == "__main__":
    main()
