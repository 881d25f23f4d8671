"""The variants of an autotuned peer are all compiled before one is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json
import torch, triton, triton.language as tl
from triton.runtime.autotuner import Autotuner
from benchmarks.peers.autotuned import compile_side_by_side
from tests.core.test_launch import NVIDIA, RecordingDriver

@triton.autotune([triton.Config({"BLOCK": n}) for n in (16, 32, 64)], key=["n"])
@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))

triton.runtime.driver.set_active(RecordingDriver(NVIDIA))
compile_side_by_side()
compiled = []

def timed(self, *args, config, **options):
    compiled.append(len(self.fn.device_caches[0][0]))
    self.fn.run(*args, **{**options, "warmup": True}, **config.all_kwargs())
    return [1.0, 1.0, 1.0]

Autotuner._bench = timed
double[(1,)](torch.zeros(64), 64)
print(json.dumps(compiled))
"""


def test_all_variants_are_compiled_before_one_is_timed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, 3, 3]
