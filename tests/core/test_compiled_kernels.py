"""Every kernel is compiled by a report: what the interpreter takes, compilers may refuse."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.dsv4 import compile_report as dsv4
from tests.kda import compile_report as kda
from tests.offline import TARGETS
from tests.softmax import compile_report as softmax
from tests.softmax.prefill import compile_report as softmax_prefill

ROOT = Path(__file__).parents[2]


def written(family: str) -> set[str]:
    """The names of the kernels in a family's sources."""
    found = set()
    for file in (ROOT / f"{family}_backend" / "kernels").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


def compiled(family: str) -> set[str]:
    """The names of those that its reports compile for Hopper."""
    if family == "kda":
        return {launch._fn.__name__ for _, launch, *_ in kda.cases("sm90")}
    if family == "dsv4":
        cases = dsv4.cases(TARGETS["sm90"][1])
        variants = (build(selection.lookup(1)) for _, selection, build, _ in cases)
        return {variant.kernel.__name__ for variant in variants}
    launches = (*softmax.cases("sm90"), *softmax.gluon_cases())
    names = {launch._fn.__name__ for _, launch, _ in launches}
    names |= {kernel.__name__ for _, kernel, *_ in softmax_prefill.cases("sm90")}
    return names | {kernel.__name__ for kernel, _ in softmax_prefill.GLUON.values()}


@pytest.mark.parametrize("family", ["kda", "dsv4", "softmax"])
def test_every_kernel_is_compiled_by_a_report(family: str) -> None:
    names = written(family)
    assert len(names) > 5
    assert names - compiled(family) == set()
