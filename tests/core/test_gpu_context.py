"""A test that breaks the GPU's context is named, and the tests after it run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.gpu_context import end_if_broken

broken = []

def synchronise():
    if broken:
        raise RuntimeError("an illegal memory access was encountered")

@pytest.fixture(autouse=True)
def whole_context(request):
    yield
    end_if_broken(request, synchronise)
"""
TESTS = """
import conftest

def test_before(): pass
def test_that_breaks(): conftest.broken.append(1)
def test_after(): assert not conftest.broken
"""


def run(folder: Path, *arguments: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_three.py").write_text(TESTS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        *arguments,
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stdout + done.stderr


def test_a_worker_ends_and_another_goes_on(tmp_path: Path) -> None:
    output = run(tmp_path, "-n", "1", "--dist", "worksteal")
    assert "test_three.py::test_that_breaks has broken the GPU's context: an illegal" in output
    assert "crashed while running 'test_three.py::test_that_breaks'" in output
    failed = [x.split(" - ")[0] for x in output.splitlines() if x.startswith("FAILED")]
    assert failed == ["FAILED test_three.py::test_that_breaks"]


def test_without_workers_the_run_ends(tmp_path: Path) -> None:
    output = run(tmp_path)
    assert "Exit: test_three.py::test_that_breaks has broken the GPU's context" in output
    assert "2 passed" in output
