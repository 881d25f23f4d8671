from __future__ import annotations

import contextlib
import dataclasses
import json
import tomllib

import pytest

from backend_core.family import Family, families
from backend_core.tables.load import explain, feature_sets, load_table
from backend_core.target import KNOWN_TARGETS, Target
from tests.core.evidence import assert_made_by_a_script
from tests.core.golden import CONFIGS, GOLDEN, render, shipped_tables

ROOT = CONFIGS.parent
MEASURED = [
    (file, number, {"gpu": table.get("gpu"), **entry})
    for file in sorted(CONFIGS.glob("*/*.toml"))
    for table in [tomllib.loads(file.read_text())]
    for number, entry in enumerate(table["path"], start=1)
    if "date" in entry
]


def test_selections_are_the_golden_ones() -> None:
    message = "a shipped table selects otherwise: run tests/core/golden.py and read the difference"
    assert render() == GOLDEN.read_text(encoding="utf-8"), message


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_every_kind_of_model_has_a_path_for_every_grid(family: Family) -> None:
    """And it is one of those that the family declares, with the parameters that it declares."""
    tables = [load_table(family.tables, t, directory=CONFIGS) for t in _targets(family)]
    assert tables
    for table in tables:
        for operator in family.tables.operators:
            for kind in feature_sets(table, operator.name):
                verdicts = explain(table, operator.name, kind)
                paths = {verdict.row for verdict in verdicts if verdict.refusal is None}
                assert paths
                assert all(path.features >= kind for path in paths)
                assert {path.name for path in paths} <= set(operator.paths)
                for path in paths:
                    declared = operator.paths[path.name]
                    assert type(path.params) is declared and dataclasses.is_dataclass(declared)


def test_every_family_is_everywhere() -> None:
    """On every part; on a CPU without launch parameters."""
    for family in families().values():
        assert _targets(family) == list(KNOWN_TARGETS.values())
        table = load_table(family.tables, KNOWN_TARGETS["cpu"], directory=CONFIGS)
        assert {(row.name, tuple(row.params_dict())) for row in table.rows} == {("torch", ())}


def test_every_table_is_read() -> None:
    assert {family for family, _ in shipped_tables()} == set(families())


def test_a_measured_row_can_be_measured_again() -> None:
    """Its source is a result file of that GPU and day, which a committed script writes."""
    assert MEASURED
    for file, number, entry in MEASURED:
        where = f"{file.parent.name}/{file.name}: path {number}"
        assert_made_by_a_script(ROOT, entry["source"], where)
        report = json.loads((ROOT / entry["source"]).read_text(encoding="utf-8"))
        found = {key: report.get(key) for key in ("gpu", "date")}
        assert found == {key: entry[key] for key in found}, where


def _targets(family: Family) -> list[Target]:
    """The known GPUs that have a table of their own or share one."""
    found = []
    for target in KNOWN_TARGETS.values():
        with contextlib.suppress(LookupError):
            load_table(family.tables, target, directory=CONFIGS)
            found.append(target)
    return found
