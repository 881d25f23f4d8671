"""The one way from a row of a path table to a launch.

An `Operator` is declared without torch, beside its launch parameters. Each of its paths is a module
of that name in the operator's folder, with one function::

    def bind(row: Row, spec: Spec, target: Target) -> Run

which fixes all that follows from the row, the layer and the GPU, and returns what runs a checked
call. A `Selection` holds an operator's rows for one layer on one GPU and their bound functions::

    selection = select(TABLES, "sparse_mla", target, spec)     # at model load
    selection.run(tokens)(call)                                # in each call
"""

from __future__ import annotations

import functools
import itertools
import sys
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backend_core.contracts import expect_kernel_device
from backend_core.tables.load import PathTable, Verdict, explain, load_table
from backend_core.tables.schema import UPSTREAM, Operator, Row, TableSchema
from backend_core.target import Target

if TYPE_CHECKING:
    from torch import Tensor

Spec = TypeVar("Spec")
Run = TypeVar("Run")


@dataclass(frozen=True, eq=False)
class Selection(Generic[Spec, Run]):
    """An operator's rows for a layer on a target, and their bound functions.

    Grids whose rows were all refused are taken over by the next larger row, and above the
    largest usable row that row itself goes on: launch parameters chosen for more parallel work are
    the closest ones known to run.

    Compared by identity. A function is bound when it is first asked for, or by `bind_all`.

    Attributes:
        rows: those that serve, in the table's order; the last is for every larger grid.
        explained: the verdict on each row of the table; none for a forced choice.
        upstream: the engine's kernel to which rows may leave their calls.
        has_kernels: whether a row launches kernels, which read a GPU's memory alone.
    """

    operator: Operator
    target: Target
    spec: Spec
    rows: tuple[Row, ...]
    explained: tuple[Verdict, ...] = field(default=(), repr=False)
    upstream: str | None = None
    has_kernels: bool = field(init=False, repr=False)
    _bounds: list[int] = field(init=False, repr=False)
    _is_limited: bool = field(init=False, repr=False)
    _runs: list[Run | None] = field(init=False, repr=False)
    _of_spec: dict[Spec, Selection[Spec, Run]] = field(init=False, repr=False)
    _of_row: dict[Row, Run] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keep = functools.partial(object.__setattr__, self)
        keep("_bounds", [row.max_grid or sys.maxsize for row in self.rows[:-1]])
        keep("_is_limited", any(row.is_limited for row in self.rows))
        keep("has_kernels", any(row.is_kernel for row in self.rows))
        keep("_runs", [None] * len(self.rows))
        keep("_of_spec", {self.spec: self})
        keep("_of_row", {})

    def row(self, grid: int, longest: int | None = None) -> Row:
        """The row for a call.

        Args:
            grid: the call's size, in the operator's units.
            longest: tokens of its longest sequence, if the host knows them; rows with limits of
                it serve no others.
        """
        return self.rows[self._index(grid, longest)]

    def choose(self, grid: int, longest: int | None = None) -> tuple[Row, Run]:
        """Find `row` and `run` of a call."""
        index = self._index(grid, longest)
        return self.rows[index], self._runs[index] or self._bind(index)

    def run(self, grid: int, longest: int | None = None) -> Run:
        """The bound function of the row for a call.

        Raises:
            LookupError: the row leaves the call to upstream.
        """
        index = self._index(grid, longest)
        return self._runs[index] or self._bind(index)

    def expect_device(self, name: str, tensor: Tensor) -> None:
        """Require a call's tensors where its path can read them, once for calls alike.

        Raises:
            ValueError: kernels run such calls, and the tensor is on a CPU.
        """
        if self.has_kernels:
            expect_kernel_device(name, tensor)

    def _index(self, grid: int, longest: int | None) -> int:
        index = bisect_left(self._bounds, grid)
        if self._is_limited:
            unit = self.operator.unit_tokens
            while not self.rows[index].serves(grid, longest, unit):
                index += 1
        return index

    def _bind(self, index: int) -> Run:
        row = self.rows[index]
        bound = self._of_row.get(row)
        if bound is None:
            made: Any = self.operator.bind(row, self.spec, self.target)
            bound = self._of_row.setdefault(row, made)  # of two threads the first's serves
        self._runs[index] = bound
        return bound

    def bind_all(self) -> tuple[Run, ...]:
        """Every function that a call may choose: at model load."""
        ours = (n for n, row in enumerate(self.rows) if row.name != UPSTREAM)
        return tuple(self._runs[n] or self._bind(n) for n in ours)

    def only(self, *rows: Row) -> Selection[Spec, Run]:
        """These rows alone, whatever they require: a forced choice. None is bound twice."""
        forced = replace(self, rows=rows, explained=())
        object.__setattr__(forced, "_of_row", self._of_row)
        return forced

    def for_spec(self, spec: Spec) -> Selection[Spec, Run]:
        """The same rows for another layer, made once."""
        of_spec = self._of_spec
        return of_spec.get(spec) or of_spec.setdefault(spec, replace(self, spec=spec))

    @property
    def sizes(self) -> tuple[tuple[int, int | None], ...]:
        """(fewest, most) of each range of grids that is not left to upstream, ascending; ``None``
        for the most where all larger grids are in the range."""
        found: list[tuple[int, int | None]] = []
        first = 1
        bounds = zip(self.rows, [*self._bounds, None], strict=True)
        for is_upstream, rows in itertools.groupby(bounds, lambda row: row[0].name == UPSTREAM):
            *_, (_, last) = rows
            if not is_upstream:
                found.append((first, last))
            first = (last or 0) + 1
        return tuple(found)


def choose(
    table: PathTable, name: str, target: Target, spec: Spec, *, upstream: str | None = None
) -> Selection[Spec, Any]:
    """Choose as `select` does, from a table that was read before."""
    operator = table.schema.operator(name)
    requires = operator.requires(spec)
    verdicts = explain(table, name, requires, upstream=upstream)
    served = tuple(verdict.row for verdict in verdicts if verdict.refusal is None)
    if not served:
        why = "; ".join(dict.fromkeys(f"{v.row.name} {v.refusal}" for v in verdicts))
        raise LookupError(f"no {name} path in {table.source} can serve this model: {why}")
    return Selection(operator, target, spec, served, verdicts, upstream)


def forced(schema: TableSchema, target: Target, spec: Spec, *rows: Row) -> Selection[Spec, Any]:
    """These rows of one operator alone, whatever they require."""
    operator = schema.operator(rows[0].operator)
    return Selection(operator, target, spec, rows)


@functools.lru_cache(maxsize=1024)
def select(
    schema: TableSchema, name: str, target: Target, spec: Spec, upstream: str | None = None
) -> Selection[Spec, Any]:
    """Choose, for every size of call, the first row of an operator that has what a layer requires.

    Args:
        spec: the layer; hashable.
        upstream: the engine's kernel that the caller can run instead. Only then do rows named
            ``upstream`` with this ``kernel`` take part.

    Raises:
        LookupError: no table for the target, or no row is left; the message gives the refusals.
    """
    return choose(load_table(schema, target), name, target, spec, upstream=upstream)
