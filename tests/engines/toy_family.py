"""A family in a package of its own, installed beside this one: nothing here knows its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

VLLM = """
from backend_core.engines.vllm_flag import BackendClaim, LayerClaim, after_init, register_family

def install(module):
    after_init(module.RMSNorm, lambda layer, config: print("TOOK", type(layer).__name__))

def choose(request):
    if request.selector.head_size == 64:
        return "heads are too narrow"
    class ToyBackend(request.upstream):
        pass
    globals()["ToyBackend"] = ToyBackend
    ToyBackend.__module__, ToyBackend.__qualname__ = __name__, "ToyBackend"
    return ToyBackend

def register():
    register_family("toy", [
        LayerClaim("linear_attention", "toy", ("vllm.model_executor.layers.layernorm",), install),
        BackendClaim("mla", "MLA", choose),
    ])
"""
SGLANG = """
from backend_core.engines.sglang_flag import BackendClaim, LayerClaim, register_family

class ToyBackend:
    def __init__(self, runner, upstream):
        self.upstream = upstream

def choose(runner, upstream):
    return ToyBackend if runner.device == "cpu" else "only the CPU is served"

def register():
    register_family("toy", [
        LayerClaim("linear_attention", "toy", lambda backend, runner: True,
                   lambda backend, runner: print("TOOK", type(backend).__name__)),
        BackendClaim("mla", "MLA", choose),
    ])
"""
ENTRY = """
from backend_core.engines import entry

def register_vllm():
    entry.register_vllm("toy", "toy_backend.vllm")

def register_sglang():
    entry.register_sglang("toy", "toy_backend.sglang")
"""


def run_beside(directory: Path, code: str) -> str:
    """What a process prints that runs ``code`` where the toy family is installed too."""
    package = directory / "toy_backend"
    package.mkdir()
    for name, text in {"__init__": "", "vllm": VLLM, "sglang": SGLANG, "plugin": ENTRY}.items():
        (package / f"{name}.py").write_text(text)
    info = directory / "toy_backend-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntoy = toy_backend.plugin:register_vllm\n"
        "[sglang.srt.plugins]\ntoy = toy_backend.plugin:register_sglang\n"
    )
    path = os.pathsep.join([str(directory), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
