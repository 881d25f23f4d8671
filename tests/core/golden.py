"""Render what every shipped table selects; run as a script, rewrite the golden file."""

from __future__ import annotations

from pathlib import Path

from backend_core.family import families
from backend_core.tables.load import PathTable, explain, feature_sets, load_table
from backend_core.tables.schema import UPSTREAM
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
    """The rows chosen for each kind of model a table serves."""
    lines = []
    for family, target in shipped_tables():
        schema = families()[family].tables
        table = load_table(schema, target, directory=CONFIGS)
        lines.append(f"# {family}/{target.key}")
        for operator in schema.operator_names:
            for kind in feature_sets(table, operator):
                lines.append(f"{operator}, needing {', '.join(sorted(kind)) or 'nothing'}")
                rows = explain(table, operator, kind)
                lines += [f"    {row}" for row in rows if row.refusal is None]
            lines += _left_to_upstream(table, operator)
    for family in families().values():
        for target in KNOWN_TARGETS.values():
            stem = load_table(family.tables, target, directory=CONFIGS).source.stem
            if stem != target.key:
                lines.append(f"# {family.name}/{target.key} is {stem}")
    return "\n".join(lines) + "\n"


def _left_to_upstream(table: PathTable, operator: str) -> list[str]:
    """The rows that are left to each kernel of an engine, where a caller has it."""
    rows = [row for row in table.rows if (row.operator, row.name) == (operator, UPSTREAM)]
    found = []
    for kernel, kind in dict.fromkeys((row.params.kernel, row.features) for row in rows):
        found.append(f"{operator}, needing {', '.join(sorted(kind)) or 'nothing'}, beside {kernel}")
        chosen = explain(table, operator, kind, upstream=kernel)
        found += [f"    {row}" for row in chosen if row.refusal is None]
    return found


if __name__ == "__main__":
    GOLDEN.write_text(render(), encoding="utf-8")
