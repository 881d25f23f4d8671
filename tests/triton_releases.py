"""The kernels under the releases of Triton that users have, beside the one of this environment.

    python -m tests.triton_releases           # minutes; rewrites the committed result
    python -m tests.triton_releases 3.9.0     # its rows alone
    python -m tests.triton_releases kernels FAMILY ARCH    # under the Triton of this environment
    PYTHONPATH=$(python -m tests.triton_releases folder 3.8.0) python -m pytest tests/softmax

torch brings Triton, and an engine asks for one torch, so the engine's release decides it. A release
is kept under ``$XDG_CACHE_HOME/kda-dsv4/triton`` (by default ``~/.cache``).
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "triton_releases.json"
RELEASES = {"3.7.1": "2.12 and 2.13", "3.8.0": "2.14", "3.9.0": "2.15"}
"""Of Triton, and the torch that brings each. The kernels were written against 3.6.0 (2.11)."""
FAMILIES = ("kda", "dsv4", "softmax")
NEWEST = "3.8.0"
"""What the newest engines bring: vLLM 0.33 and sglang 0.5.23 ask for torch 2.14."""
ARCHITECTURES = ("sm90", "gfx950")


def folder(release: str) -> Path:
    """Where this release lies, fetched if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "kda-dsv4" / "triton" / release
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as unfinished:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command = [*pip, "--disable-pip-version-check", "--target", unfinished]
            subprocess.run([*command, f"triton=={release}"], check=True)
            shutil.move(unfinished, place)
            Path(unfinished).mkdir()  # for the context manager to remove
    return place


Compilation = tuple[str, Callable[[], dict[str, int]]]
"""A kernel's name, and what compiles and measures it."""


def kernels(family: str, arch: str) -> Iterator[Compilation]:
    """Each kernel of a family that an architecture's table can choose, in the first of its
    variants."""
    if family == "softmax":
        yield from _first(_softmax(arch))
    else:
        yield from _first(_kda(arch) if family == "kda" else _dsv4(arch))


def _first(found: Iterator[Compilation]) -> Iterator[Compilation]:
    seen = set()
    for name, build in found:
        if name not in seen:
            seen.add(name)
            yield name, build


def _kda(arch: str) -> Iterator[Compilation]:
    from tests.kda import compile_report as kda

    for case in kda.cases(arch):
        yield case[1]._fn.__name__, lambda case=case: kda.compile_case(arch, case)


def _dsv4(arch: str) -> Iterator[Compilation]:
    from tests.dsv4 import compile_report as dsv4
    from tests.offline import TARGETS, measure

    def build(case: Any) -> dict[str, int]:
        found = dsv4.compile_case(arch, case, False)
        assert found is not None
        return measure(found[1])

    for case in dsv4.cases(TARGETS[arch][1]):
        _, selection, variant, _ = case
        name = variant(selection.lookup(1)).kernel.__name__
        yield name, lambda case=case: build(case)


def _softmax(arch: str) -> Iterator[Compilation]:
    from softmax_backend.variants import masks
    from tests.offline import measure
    from tests.softmax import compile_report as decode
    from tests.softmax.prefill import compile_report as prefill

    for case in decode.cases(arch):
        yield case[1]._fn.__name__, lambda case=case: decode.compile_case(arch, case)
    for case in prefill.cases(arch):
        yield case[1].__name__, lambda case=case: prefill.compile_case(arch, case)
    if arch == "sm90":
        for case in decode.gluon_cases():
            yield case[1]._fn.__name__, lambda case=case: measure(decode.build_gluon(case))
        for name, (kernel, _) in prefill.GLUON.items():
            yield (
                kernel.__name__,
                lambda name=name: measure(prefill.build_gluon(128, 2, masks.causal, name)),
            )


def compiled(family: str, arch: str) -> dict[str, dict[str, int] | str]:
    """What this process' Triton makes of each kernel, or the error that it ends in."""
    found: dict[str, dict[str, int] | str] = {}
    for name, build in kernels(family, arch):
        try:
            found[name] = build()
        except Exception as error:  # a compiler's errors are of many classes
            found[name] = " ".join(f"{error} {error.__cause__ or ''}".split())[-500:]
    return found


def compiled_under(release: str, family: str, arch: str) -> dict[str, dict[str, int] | str]:
    """``compiled`` in a process with this release of Triton."""
    with tempfile.TemporaryDirectory() as cache:
        environment = _environment(release) | {"TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "tests.triton_releases", "kernels", family, arch]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"Triton {release}: {done.stderr[-2000:]}")
    found: dict[str, dict[str, int] | str] = json.loads(done.stdout)
    return found


def _environment(release: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder(release))}


def rows(release: str) -> Iterator[dict[str, Any]]:
    """The lines of the committed result for one release."""
    for arch in ARCHITECTURES:
        found = {}
        for family in FAMILIES:
            found |= compiled_under(release, family, arch)
        yield {
            "triton": release,
            "torch": RELEASES.get(release),
            "what": f"kernels for {arch}",
            "kernels": len(found),
            "failed": {name: line for name, line in found.items() if isinstance(line, str)},
        }


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["folder"]:
        print(folder(arguments[1]))
        return 0
    if arguments[:1] == ["kernels"]:
        print(json.dumps(compiled(*arguments[1:])))
        return 0
    found = []
    for release in arguments or RELEASES:
        for row in rows(release):
            print(json.dumps(row), flush=True)
            found.append(row)
    write(found)
    return any(row["failed"] for row in found)


def write(found: list[dict[str, Any]]) -> None:
    """Into the committed result, whose rows of other releases stay."""
    again = {row["triton"] for row in found}
    if RESULT.exists():
        found += [r for r in json.loads(RESULT.read_text())["rows"] if r["triton"] not in again]
    found.sort(key=lambda row: list(RELEASES).index(row["triton"]))
    head = {
        "script": "tests/triton_releases.py",
        "torch": torch.__version__,
        "triton": ", ".join(RELEASES),
        "date": datetime.date.today().isoformat(),
    }
    body = ",\n".join(f"  {json.dumps(row)}" for row in found)
    RESULT.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
