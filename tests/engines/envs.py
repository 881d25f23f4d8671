"""Virtual environments that hold a real engine, and the engine tests run in them.

    python tests/engines/envs.py                    # the newest of each, and part of another
    python tests/engines/envs.py all                # every tested release
    python tests/engines/envs.py vllm==0.32.0 ...   # these alone

``envs.toml`` says what goes into each environment, which is made where it is missing. The older
releases take turns by the day, and so do the families whose tests run in them, next to the tests of
seams. An environment is kept under ``$XDG_CACHE_HOME/kda-dsv4/engines``
(by default ``~/.cache``), named after its engine and a hash of its contents. torch, triton,
transformers and pytest are those of the interpreter that runs this file, found through a ``.pth``
file: no second torch is downloaded.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LONG = ("kda", "mla")
"""Families whose tests take longest: begun last, they would leave cores without work."""
COMPILED = (".so", ".a", ".cubin", ".hpp", ".cuh")


def main(names: list[str]) -> int:
    recipes = load_recipes()
    if names == ["all"]:
        names = list(recipes)
    if unknown := [name for name in names if name not in recipes]:
        print(f"no such engine: {', '.join(unknown)}; there are {', '.join(recipes)}")
        return 2
    wanted = {name: places_of(name) for name in names}
    wanted = wanted or folders_of_the_day(recipes, datetime.date.today().toordinal())
    failed, ready = [], {}
    for name in wanted:
        try:
            ready[name] = environment(name, recipes[name])
        except subprocess.CalledProcessError:
            print(f"{name}: no environment, since pip (above) could not have its wheels")
            failed.append(name)
    # one thread of torch each, so as many processes as there are cores, the slow ones first
    runs = [(name, place) for name in ready for place in wanted[name]]
    runs.sort(key=lambda run: run[1].parent.name not in LONG)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = {
            pool.submit(run_tests, ready[name], place, recipes[name]): (name, place)
            for name, place in runs
        }
        for run in as_completed(done):
            name, place = done[run]
            status, output = run.result()
            print(f"== {name} {place.parent.name}\n{output}", flush=True)
            if status and name not in failed:
                failed.append(name)
    if failed:
        print(f"engine tests failed for {', '.join(failed)}")
    return len(failed)


def load_recipes() -> dict[str, dict[str, Any]]:
    """The recipes of ``envs.toml`` by engine and release, oldest first, each complete."""
    said: dict[str, dict[str, Any]] = tomllib.loads(
        (Path(__file__).parent / "envs.toml").read_text()
    )
    recipes = {}
    for name, own in said.items():
        first = {key: x for key, x in said.get(own.get("like", ""), {}).items() if key != "ci"}
        recipe = {**first, **own}
        recipe["packages"] = recipe["packages"].split()
        recipes[name] = recipe
    return recipes


def folders_of_the_day(recipes: dict[str, dict[str, Any]], day: int) -> dict[str, list[Path]]:
    """The folders of tests by release: all of each release that is always run; of that one of the
    others whose turn it is, those of its seams and of one family."""
    others = [name for name, recipe in recipes.items() if recipe.get("ci") != "always"]
    found = {name: places_of(name) for name in recipes if name not in others}
    turn, turn_of_family = others[day % len(others)], day // len(others)
    seams = [place for place in places_of(turn) if place.parent.name == "core"]
    families = [place for place in places_of(turn) if place not in seams]
    return {**found, turn: [*seams, families[turn_of_family % len(families)]]}


def environment(name: str, recipe: dict[str, Any]) -> Path:
    """The interpreter of an engine's environment, made where there is none with these contents.

    Raises:
        subprocess.CalledProcessError: a package cannot be had.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    contents = json.dumps([name, recipe["packages"], sys.version])
    key = hashlib.sha256(contents.encode()).hexdigest()[:12]
    place = cache / "kda-dsv4" / "engines" / f"{name.replace('==', '-')}-{key}"
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
        _install(python, recipe["packages"])
        _unpack(name, _site_packages(place))
        (place / "complete").touch()
    if not (place / "bytecode").exists():  # else each process compiles the engine's sources anew
        package = _site_packages(place) / name.split("==")[0].removesuffix("-core")
        subprocess.run([python, "-m", "compileall", "-q", "-j", "0", package], check=False)
        (place / "bytecode").touch()
    _link(place)
    return python


def places_of(name: str) -> list[Path]:
    """The folders of an engine's tests, one of each family."""
    return sorted(Path(__file__).parent.glob(f"*/{name.split('==')[0].replace('-', '_')}"))


def run_tests(python: Path, place: Path, recipe: dict[str, Any]) -> tuple[int, str]:
    """pytest in an engine's environment, over one family's tests of that engine.

    Returns:
        0 where all passed, and what was printed.
    """
    variables = {
        "CUDA_VISIBLE_DEVICES": "",  # explicitly none: engines then keep the real triton
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
        **recipe.get("environment", {}),
    }
    # a process each: a distributed group is made once
    run = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", place],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return run.returncode, run.stdout


def _install(python: Path, packages: list[str]) -> None:
    options = ["-q", "--no-deps", "--disable-pip-version-check", "--only-binary=:all:"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *options, *packages]
    subprocess.run(pip, check=True)


def _unpack(wheel: str, site_packages: Path) -> None:
    """The Python part of a wheel, which pip fetches or has in its cache."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["-q", "--no-deps", "--disable-pip-version-check", "--only-binary=:all:"]
        pip = [sys.executable, "-m", "pip", "download", *options, "-d", directory, wheel]
        subprocess.run(pip, check=True)
        for file in Path(directory).glob("*.whl"):
            with zipfile.ZipFile(file) as archive:
                members = [m for m in archive.namelist() if not m.endswith(COMPILED)]
                archive.extractall(site_packages, members)


def _link(place: Path) -> None:
    """This tree, its entry points and the development environment, behind the engine's packages.

    Entry points are read from the metadata of a distribution, which installing this package would
    write.
    """
    site_packages = _site_packages(place)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [str(ROOT), sysconfig.get_paths()["purelib"]]
    (site_packages / "zz_development.pth").write_text("\n".join(lines) + "\n")
    info = site_packages / f"{project['name'].replace('-', '_')}-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


def _site_packages(place: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return place / "lib" / version / "site-packages"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
