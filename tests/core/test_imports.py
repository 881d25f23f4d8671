"""Who may import whom, read from the source, and that nobody does so in a circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backend_core.family import PACKAGES
from tests.core.import_graph import circles, graph, imported_names, modules_of

ROOT = Path(__file__).parents[2]
OURS = ("backend_core", "backend_cli", *PACKAGES)
ENGINES = {"vllm", "sglang", "transformers"}
# Modules of a family that its kernels may import: facts alone.
FACTS = ("spec", "step_plan", "launch_params", "kernels")


def violations(root: Path) -> list[str]:
    """``file imports module`` for every import that breaks a rule."""
    found = []
    for package in OURS:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            for module in imported_names(file, parts):
                if module.split(".")[0] in sys.stdlib_module_names:
                    continue
                if not _allowed(parts, module):
                    found.append(f"{file.relative_to(root)} imports {module}")
    return found


def _allowed(parts: tuple[str, ...], module: str) -> bool:
    package, top = parts[0], module.split(".")[0]
    if top in ENGINES:
        return "engines" in parts[1:-1]
    if top in ("benchmarks", "tests", "tools", "docs"):
        return False
    if package == "backend_core":
        return top in {"backend_core", "torch", "triton"}
    if package in PACKAGES and top in OURS and top not in {package, "backend_core"}:
        return False
    if "kernels" in parts[1:-1]:
        own = tuple(f"{package}.{name}" for name in FACTS)
        return top in {"torch", "triton", "backend_core"} or module.startswith(own)
    if package in PACKAGES and parts[-1] == "reference":
        return top == "torch" or module.startswith(f"{package}.spec.")
    # the program loops over families
    return package != "backend_cli" or top not in PACKAGES


def test_the_packages_keep_the_rules() -> None:
    assert violations(ROOT) == []


def test_there_is_no_circle() -> None:
    """For the type checker neither."""
    assert circles(graph(ROOT, modules_of(ROOT, OURS), typed=True)) == []


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"a.py": "def f():\n    from kda_backend.b import x", "b.py": "from . import a"},
            ["kda_backend.a", "kda_backend.b"],
        ),
        (  # as kda_backend/engines/vllm.py once found the class for a release of vLLM
            {
                "engines/vllm.py": "import importlib\ndef f(form):\n    importlib.import_module("
                'f"kda_backend.engines.{form}")',
                "engines/vllm_glm.py": "from kda_backend.engines.vllm_layer import Layer",
                "engines/vllm_layer.py": "from kda_backend.engines.vllm import flag_name",
            },
            [f"kda_backend.engines.{name}" for name in ("vllm", "vllm_glm", "vllm_layer")],
        ),
        (
            {
                "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
                "    from kda_backend import b",
                "b.py": "from kda_backend import a",
            },
            ["kda_backend.a", "kda_backend.b"],
        ),
    ],
)
def test_a_circle_is_found(tmp_path: Path, files: dict[str, str], found: list[str]) -> None:
    for name, source in files.items():
        file = tmp_path / "kda_backend" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    modules = modules_of(tmp_path, ["kda_backend"])
    assert circles(graph(tmp_path, modules, typed=True)) == [found]


@pytest.mark.parametrize(
    ("file", "source", "module"),
    [
        ("kda_backend/kernels/scan.py", "import numpy", "numpy"),
        ("kda_backend/kernels/scan.py", "from ..api import run", "kda_backend.api.run"),
        (
            "kda_backend/kernels/scan.py",
            "from dsv4_backend.kernels.norm import norm",
            "dsv4_backend.kernels.norm.norm",
        ),
        ("kda_backend/api.py", "def f():\n    import sglang", "sglang"),
        ("kda_backend/api.py", "from dsv4_backend import api", "dsv4_backend.api"),
        (
            "dsv4_backend/api.py",
            "import importlib\nimportlib.import_module('backend_cli.main')",
            "backend_cli.main",
        ),
        ("kda_backend/reference.py", "import kda_backend.api", "kda_backend.api"),
        ("backend_core/strict.py", "from kda_backend import api", "kda_backend.api"),
        ("backend_cli/info.py", "from kda_backend import api", "kda_backend.api"),
        ("backend_cli/bench.py", "from benchmarks import regimes", "benchmarks.regimes"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, file: str, source: str, module: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == [f"{file} imports {module}"]


def test_families_and_references_run_without_triton_and_engines() -> None:
    packages = ", ".join(f"{package}.reference" for package in PACKAGES)
    code = (
        "import sys\n"
        "for name in ('triton', 'vllm', 'sglang', 'transformers'): sys.modules[name] = None\n"
        f"import {packages}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
