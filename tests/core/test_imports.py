"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("backend_core", "backend_cli", "kda_backend", "dsv4_backend")
ENGINES = {"vllm", "sglang", "transformers"}
OPERATORS = ("kda_backend", "dsv4_backend")


def violations(root: Path) -> list[str]:
    """``file imports module`` for every import that breaks a rule."""
    found = []
    for package in OURS:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            for module in imported_modules(file, parts):
                if module.split(".")[0] in sys.stdlib_module_names:
                    continue
                if not _allowed(parts, module):
                    found.append(f"{file.relative_to(root)} imports {module}")
    return found


def imported_modules(file: Path, parts: tuple[str, ...]) -> Iterator[str]:
    """Every module that ``file`` imports, at its top or inside a function, as an absolute name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(parts[: len(parts) - node.level]) if node.level else []
            base += [node.module] if node.module else []
            # "from package import module" may name a module.
            yield from (".".join([*base, alias.name]) for alias in node.names)


def _allowed(parts: tuple[str, ...], module: str) -> bool:
    package, top = parts[0], module.split(".")[0]
    if top in ENGINES:
        return "engines" in parts[1:-1]
    if package == "backend_core":
        return top in {"backend_core", "torch", "triton"}
    if package in OPERATORS and top in OURS and top not in {package, "backend_core"}:
        return False
    if "kernels" in parts[1:-1]:
        own = (f"{package}.spec", f"{package}.step_plan", f"{package}.kernels")
        return top in {"torch", "triton", "backend_core"} or module.startswith(own)
    if package in OPERATORS and parts[-1] == "reference":
        return top == "torch" or module.startswith(f"{package}.spec.")
    return True


def test_the_packages_keep_the_rules() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "module"),
    [
        ("kda_backend/kernels/scan.py", "import numpy", "numpy"),
        ("kda_backend/kernels/scan.py", "from ..api import run", "kda_backend.api.run"),
        ("kda_backend/kernels/scan.py", "import vllm.utils", "vllm.utils"),
        (
            "kda_backend/kernels/scan.py",
            "from dsv4_backend.kernels.norm import norm",
            "dsv4_backend.kernels.norm.norm",
        ),
        ("kda_backend/api.py", "def f():\n    import sglang", "sglang"),
        ("kda_backend/api.py", "from dsv4_backend import api", "dsv4_backend.api"),
        ("dsv4_backend/api.py", "import backend_cli.main", "backend_cli.main"),
        ("kda_backend/reference.py", "import triton", "triton"),
        ("kda_backend/reference.py", "import kda_backend.api", "kda_backend.api"),
        ("backend_core/strict.py", "from kda_backend import api", "kda_backend.api"),
        ("backend_core/strict.py", "import numpy", "numpy"),
        ("backend_cli/info.py", "import transformers", "transformers"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, file: str, source: str, module: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == [f"{file} imports {module}"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kda_backend/kernels/scan.py", "import math\nimport torch\nimport triton.language as tl"),
        ("kda_backend/kernels/scan.py", "from kda_backend.step_plan import ChunkMetadata"),
        ("kda_backend/kernels/scan.py", "from . import elementwise"),
        ("kda_backend/engines/vllm.py", "from vllm import envs\nfrom kda_backend import api"),
        ("kda_backend/reference.py", "from __future__ import annotations\nimport torch"),
        ("dsv4_backend/reference.py", "from dsv4_backend.spec import CacheFormat"),
        ("backend_cli/info.py", "import rich\nfrom kda_backend import api"),
    ],
)
def test_a_kept_rule_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations(tmp_path) == []


def test_the_references_run_without_triton_and_engines() -> None:
    code = (
        "import sys\n"
        "for name in ('triton', 'vllm', 'sglang', 'transformers'): sys.modules[name] = None\n"
        "import kda_backend.reference, dsv4_backend.reference"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
