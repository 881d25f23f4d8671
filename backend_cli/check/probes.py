"""The work of ``kda-dsv4 check``: one probe for each call of each row of the tables."""

from __future__ import annotations

from dataclasses import dataclass

from backend_cli.families import table_of
from backend_core.family import CheckCase, Family, families
from backend_core.tables.load import PathTable
from backend_core.tables.schema import UPSTREAM, Row
from backend_core.target import Target

WORKER = "backend_cli.check.worker"


@dataclass(frozen=True)
class Probe:
    """One call of one table row.

    Attributes:
        grids: the sizes of call that the table has it for, in words.
        case: the name of the call; empty if there is no call to make.
        skip: why it cannot be made here, or ``None``.
        run: makes it; ``None`` where it cannot be made.
    """

    family: str
    row: Row
    grids: str
    case: str
    skip: str | None
    run: CheckCase | None


def probes(target: Target, *, interpreted: bool) -> list[Probe]:
    """Every probe of the tables of ``target``, the same list in every process.

    Args:
        interpreted: the kernels are to run in Triton's interpreter.

    Raises:
        LookupError: a family has no table for this target.
        BadInputError: a table is malformed.
    """
    tables = {family: table_of(family, target) for family in families().values()}
    return [
        probe
        for family, table in tables.items()
        for probe in _of_table(family, table, interpreted=interpreted)
    ]


def _of_table(family: Family, table: PathTable, *, interpreted: bool) -> list[Probe]:
    found: list[Probe] = []
    for operator in family.tables.operator_names:
        # rows of one path and one set of parameters are one kernel, for several sizes
        kernels: dict[object, tuple[Row, list[str]]] = {}
        for row in (row for row in table.rows if row.operator == operator):
            grids = "any" if row.max_grid is None else f"to {row.max_grid}"
            key = (row.name, row.params, row.features)
            kernels.setdefault(key, (row, []))[1].append(grids)
        for row, labels in kernels.values():
            found += probes_of(family, row, ", ".join(labels), interpreted=interpreted)
    return found


def probes_of(family: Family, row: Row, grids: str, *, interpreted: bool) -> list[Probe]:
    """The probes of one row; a single skipped one where it cannot run here."""
    skip = None
    if row.name == UPSTREAM:
        skip = f"is left to {row.params.kernel}"
    elif interpreted and row.name not in family.interpretable:
        skip = "is not written in Triton"
    elif not (cases := family.check_cases(row)):
        skip = "is what other paths are compared with"
    if skip is not None:
        return [Probe(family.name, row, grids, "", skip, None)]
    return [Probe(family.name, row, grids, name, None, run) for name, run in cases.items()]
