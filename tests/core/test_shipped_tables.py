from __future__ import annotations

import tomllib
from pathlib import Path

from backend_core.tables.select import PHASES, load_table, select
from backend_core.target import KNOWN_TARGETS
from tests.core.golden import CONFIGS, GOLDEN, render, shipped_tables


def test_selections_are_the_golden_ones() -> None:
    message = "a shipped table selects otherwise: run tests/core/golden.py and read the difference"
    assert render() == GOLDEN.read_text(encoding="utf-8"), message


def test_every_known_target_has_kda_paths() -> None:
    for target in KNOWN_TARGETS.values():
        table = load_table("kda", target, directory=CONFIGS)
        for phase in PHASES["kda"]:
            assert select(table, phase).lookup(1).params is not None


def test_every_table_is_read() -> None:
    families = {family for family, _ in shipped_tables()}
    assert families == set(PHASES)


def test_a_measured_row_names_a_result_file_of_this_repository() -> None:
    root = CONFIGS.parent
    for file in CONFIGS.glob("*/*.toml"):
        for entry in tomllib.loads(file.read_text())["path"]:
            if entry["measured"]:
                source = Path(entry["source"])
                assert source.parts[:2] == ("benchmarks", "results"), f"{file}: {source}"
                assert (root / source).is_file(), f"{file}: {source} does not exist"
