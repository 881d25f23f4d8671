"""What pip gives a user: the wheel and the editable install, each used from outside the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from backend_cli.bench import scripts
from backend_core.engines import entry
from backend_core.family import PACKAGES
from tests.core.evidence import shared_modules

ROOT = Path(__file__).parents[2]
OURS = ("backend_cli", "backend_core", *PACKAGES)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BENCHMARKS = "kda_dsv4_benchmarks"

# Run in an installed copy; prints where the package and its tables come from.
PROBE = """
import sys, backend_core
from backend_core.family import families
from backend_core.tables.load import explain, load_table
from backend_core.target import KNOWN_TARGETS
print(backend_core.__file__)
for target in KNOWN_TARGETS.values():
    table = load_table(families()["kda"].tables, target)
    assert any(row.refusal is None for row in explain(table, "prefill"))
    print(table.source)
"""

SCRIPTS_PROBE = """
from backend_cli.bench import script_file, scripts
for script in scripts().values():
    print(script_file(script))
"""


def test_every_folder_with_modules_is_packaged() -> None:
    folders = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for package in OURS
        for file in (ROOT / package).rglob("*.py")
    }
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    assert packages == folders | {"backend_core.configs"}
    assert set(PROJECT["tool"]["mypy"]["packages"]) == {*OURS, "benchmarks", "tools.fuzz"}


def test_entry_points_are_named_after_families() -> None:
    entries = dict(PROJECT["project"]["entry-points"])
    video = entries.pop("sglang.multimodal_gen.plugins")
    assert video == {"block_sparse": "block_sparse_backend.engines.sglang_diffusion:register"}
    fla = entries.pop("torch.backends")
    assert fla == {"kda_dsv4_fla": "kda_backend.fla_backend:autoload"}
    groups = {
        "vllm.general_plugins": entry.register_vllm,
        "sglang.srt.plugins": entry.register_sglang,
    }
    assert set(entries) == set(groups)
    for group, register in groups.items():
        adapted = [name for name in PACKAGES if (ROOT / name / "engines" / "vllm.py").exists()]
        assert [f"{name}_backend" for name in entries[group]] == adapted
        for name, value in entries[group].items():
            found = EntryPoint(name, value, group).load()
            assert (found.func, found.args) == (register, (name,))


def _what_bench_runs() -> set[Path]:
    """The scripts of `Family.benchmarks` and the modules that they import, with their packages."""
    left = [ROOT / "benchmarks" / script for script in scripts().values()]
    found: set[Path] = set()
    while left:
        file = left.pop()
        if file.relative_to(ROOT) not in found:
            found |= {file.relative_to(ROOT), file.with_name("__init__.py").relative_to(ROOT)}
            left += shared_modules(ROOT, file)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged: building leaves files behind."""
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("source")
    for name in (*OURS, "configs", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "recall")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    _python(source, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out))
    (wheel,) = out.glob("*.whl")
    return wheel


def _python(cwd: Path, *args: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_table_marker_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tables = {f"backend_core/{file.relative_to(ROOT)}" for file in ROOT.glob("configs/*/*.toml")}
    modules = {
        str(file.relative_to(ROOT)) for package in OURS for file in ROOT.glob(f"{package}/**/*.py")
    }
    assert tables and tables <= names
    sources = {str(file.relative_to(ROOT)) for file in ROOT.glob("kda_backend/kernels/**/*.cu*")}
    assert sources and sources <= names
    assert {f"{package}/py.typed" for package in OURS} <= names
    assert modules <= names
    scripts = {name for name in names if name.startswith(BENCHMARKS)}
    assert scripts == {f"{BENCHMARKS}/{file}" for file in _what_bench_runs()}
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks", "docs"))]


def test_installing_changes_nothing_an_engine_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    requirements = [
        line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line
    ]
    required = [line for line in requirements if "extra ==" not in line]
    # typer and rich are in every environment that holds transformers, hence in each engine's.
    assert {re.split(r"[^\w-]", line)[0] for line in required} == {"typer", "rich"}
    assert not [line for line in required if "==" in line or "<" in line]
    assert "License-Expression: Apache-2.0" in lines
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if "Provides-Extra" in line}
    assert {"cpu", "eval", "bench", "dev"} <= extras


def test_an_installed_wheel_finds_its_tables(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target))
    _python(tmp_path, *pip, str(wheel))
    out = _python(
        tmp_path, "-c", PROBE + SCRIPTS_PROBE, PYTHONPATH=str(target), XDG_CONFIG_HOME=str(tmp_path)
    )
    assert all(line.startswith(str(target)) for line in out.splitlines()), out
    script = subprocess.run(
        [target / "bin" / "kda-dsv4", "--version"],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert script.returncode == 0, script.stderr


def test_an_editable_install_finds_its_tables(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    _python(tmp_path, *pip, "--target", str(target), "--editable", str(source))
    # A .pth file works in a site directory only; -S leaves out this environment's own.
    probe = f"import site; site.addsitedir({str(target)!r});{PROBE}"
    out = _python(tmp_path, "-S", "-c", probe, XDG_CONFIG_HOME=str(tmp_path), PYTHONPATH="")
    assert all(line.startswith(str(source)) for line in out.splitlines()), out
