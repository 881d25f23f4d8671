"""Render what every shipped table selects; run as a script, rewrite the golden file."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from backend_core.family import families
from backend_core.tables import select as path_table
from backend_core.tables.select import feature_sets, load_table, select
from backend_core.target import KNOWN_TARGETS, Target

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).with_name("golden_selections.txt")


def shipped_tables() -> list[tuple[str, Target]]:
    """Family and target of every table in the source tree."""
    found = []
    for file in sorted(CONFIGS.glob("*/*.toml")):
        vendor, _, arch = file.stem.partition("_")
        found.append((file.parent.name, Target(vendor, arch or vendor, 1, file.stem)))
    return found


def render() -> str:
    """The rows chosen for each kind of model a table serves, with no vendor package installed."""
    lines = []
    with mock.patch.object(path_table, "_is_installed", return_value=False):
        for family, target in shipped_tables():
            schema = families()[family].tables
            table = load_table(schema, target, directory=CONFIGS)
            lines.append(f"# {family}/{target.key}")
            for operator in schema.operator_names:
                for kind in feature_sets(table, operator):
                    lines.append(f"{operator}, needing {', '.join(sorted(kind)) or 'nothing'}")
                    rows = select(table, operator, kind).explain()
                    lines += [f"    {row}" for row in rows if row.refusal is None]
    for family in families().values():
        for target in KNOWN_TARGETS.values():
            stem = load_table(family.tables, target, directory=CONFIGS).source.stem
            if stem != target.key:
                lines.append(f"# {family.name}/{target.key} is {stem}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(render(), encoding="utf-8")
