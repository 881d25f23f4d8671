"""Choosing this family's paths beside the kernel that an engine runs.

Sizes of call at which no result has ours ahead are rows ``upstream`` of the path table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from backend_core.operator import Selection, select
from backend_core.tables.schema import UPSTREAM, Row
from backend_core.target import Target
from mla_backend.launch_params import TABLES

Kind = TypeVar("Kind")
Spec = TypeVar("Spec")


@dataclass(frozen=True)
class Beside(Generic[Kind, Spec]):
    """An operator's paths for the kinds of call that an engine has a kernel for.

    Attributes:
        served: the paths of each kind of which some size of call runs here.
        refused: of each other kind, why the engine's kernel keeps it whole.
    """

    served: dict[Kind, Selection[Spec, Any]]
    refused: dict[Kind, str]

    def covers(self, kind: Kind, size: int) -> bool:
        """Whether a call of so many units of the grid runs here."""
        selection = self.served.get(kind)
        return selection is not None and selection.row(size).name != UPSTREAM

    @property
    def why(self) -> str:
        """The reasons of what is refused."""
        return "; ".join(dict.fromkeys(self.refused.values()))


def select_beside(
    operator: str, target: Target, specs: Mapping[Kind, Spec], kernel: str
) -> Beside[Kind, Spec]:
    """Choose an operator's paths where an engine could run its own kernel.

    Args:
        specs: the layer, by kind of call.
        kernel: the engine's, as path tables name it.
    """
    found: Beside[Kind, Spec] = Beside({}, {})
    for kind, spec in specs.items():
        try:
            selection = select(TABLES, operator, target, spec, kernel)
        except LookupError as error:
            found.refused[kind] = str(error)
            continue
        if not _compared(selection):
            found.refused[kind] = f"no result compares {operator} with {kernel} on {target.arch}"
        elif not selection.sizes:
            found.refused[kind] = selection.rows[0].provenance.removeprefix("not measured, ")
        else:
            found.served[kind] = selection
    return found


def sizes_in_words(selection: Selection[Any, Any]) -> str:
    """The sizes of call that run here, after ``of``: ``up to 16 and of 64 to 128``."""
    if selection.sizes == ((1, None),):
        return "any number of"
    words = []
    for low, high in selection.sizes:
        fewest = "up" if low == 1 else low
        words.append(f"{fewest} to {high}" if high else f"{low} and more")
    return " and of ".join(words)


def result_file(selection: Selection[Any, Any]) -> str:
    """The result that has these sizes ahead of the engine's kernel."""
    newest = max(_compared(selection), key=lambda row: row.measured)
    return newest.provenance.rpartition(", ")[2]


def _compared(selection: Selection[Any, Any]) -> list[Row]:
    """The table's rows that leave calls to the engine's kernel, of layers of any kind."""
    rows = (verdict.row for verdict in selection.explained if verdict.row.name == UPSTREAM)
    return [row for row in rows if row.params.kernel == selection.upstream]
