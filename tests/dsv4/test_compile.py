"""Every kernel that a table chooses builds for every architecture, and costs what the report says.

The compiler runs in a process of its own: this one may have Triton's interpreter on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads(Path(__file__).with_name("compile_report.json").read_text())
# Bytes of shared memory (LDS) that one program may use.
SHARED_LIMIT = {"sm90": 232448, "sm100": 232448, "gfx942": 65536, "gfx950": 163840}


@pytest.mark.parametrize("arch", sorted(SHARED_LIMIT))
def test_report(arch: str, tmp_path: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), TRITON_CACHE_DIR=str(tmp_path))
    environment.pop("TRITON_INTERPRET", None)
    script = ROOT / "tests" / "dsv4" / "compile_report.py"
    command = [sys.executable, str(script), arch]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    for name, line in report.items():
        assert line["spills"] == 0, f"{name} spills registers"
        assert line["stack"] == 0, f"{name} uses local memory"
        assert line["shared"] <= SHARED_LIMIT[arch], f"{name} needs {line['shared']} bytes"
        if line["num_warps"] == 1:
            assert line["barriers"] == 0, f"{name} waits for itself"
            assert line["shared"] == 0, f"{name} goes through shared memory"
        if name.startswith("in_place 128"):
            assert line["loads"] <= 6 and line["stores"] <= 2, f"{name}: {line}"
    if triton.__version__ == COMMITTED["triton"]:
        message = (
            "the kernels compile differently: run tests/dsv4/compile_report.py and read the diff"
        )
        assert report == COMMITTED[arch], message
