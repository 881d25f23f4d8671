"""The kernels compile, and are interpreted, with the Triton that the newest engines bring, which is
not that of CI."""

from __future__ import annotations

import ast
import os

import pytest

from backend_cli.check.command import WORKER
from backend_cli.check.probes import probes
from backend_cli.worker import Worker
from backend_core.target import KNOWN_TARGETS
from tests.triton_releases import FAMILIES, NEWEST, ROOT, compiled_under, folder, kernels


def written(family: str) -> set[str]:
    """The names of the kernels in a family's sources."""
    found = set()
    for file in (ROOT / f"{family}_backend" / "kernels").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_among_those_compiled(family: str) -> None:
    """What the interpreter takes, compilers may refuse. The cases are those of the reports."""
    assert len(written(family)) > 5
    assert {name for name, _ in kernels(family, "sm90")} >= written(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_for_hopper(family: str) -> None:
    found = compiled_under(NEWEST, family, "sm90")
    assert set(found) == {name for name, _ in kernels(family, "sm90")}
    assert {name: line for name, line in found.items() if isinstance(line, str)} == {}


@pytest.mark.interpreter
def test_check_interprets_a_gated_decode() -> None:
    """``kda-dsv4 check --interpret H200`` in an environment of the newest engines."""
    target = KNOWN_TARGETS["H200"]
    number = next(
        number
        for number, probe in enumerate(probes(target, interpreted=True))
        if probe.row.operator == "recurrent" and probe.skip is None
    )
    path = os.pathsep.join([str(folder(NEWEST)), str(ROOT)])
    worker = Worker(WORKER, ["H200"], {"TRITON_INTERPRET": "1", "PYTHONPATH": path})
    answer = worker.ask(str(number), 120.0)
    worker.close()
    assert answer["status"] == "ok", answer
