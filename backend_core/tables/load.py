"""Kernel paths as data: TOML tables with provenance, and which of their rows can serve a layer.

A table serves one family of operators on one architecture. Its ``[[path]]`` rows name, for each
operator, which path runs up to which grid and with which launch parameters:

    source = "offline compilation"    # of rows that name none
    gpu = "NVIDIA H200"               # of rows that name none, where they were measured

    [[path]]
    operator = "recurrent"
    name = "recurrent"
    max_grid = 264                # serves grids up to and including this one
    features = ["bounded_gate"]   # of the path's (`schema.Operator`), all by default
    source = "benchmarks/results/kda_decode_h200.json"
    date = "2026-11-21"           # the row's parameters were measured
    [path.params]                 # the fields of the path's dataclass (`schema.Operator.paths`)
    block_v = 32

Rows of one operator come in ascending ``max_grid``; the last has none and is open. Rows with the
same ``max_grid`` are alternatives, the preferred first.

A table that was written for one release of the package (``kda-dsv4 tune``) says so with
``release = "0.1.0"``; another release refuses it, since launch parameters come and go with the
kernels.

A table with ``like = "nvidia_sm80"`` has that table's rows; its own ``[[path]]`` entries say what
differs in them.

Tables are looked up in ``$KDA_DSV4_CONFIG_DIR`` (by default ``$XDG_CONFIG_HOME/kda-dsv4``), then
among those that ship with the package; the first file found is used whole.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend_core.strict import warn_once
from backend_core.tables.schema import (
    LIMITS,
    UPSTREAM,
    Row,
    TableSchema,
    limits_in_words,
    parse_table,
)
from backend_core.target import Target

__all__ = [
    "PathTable",
    "Row",
    "Verdict",
    "explain",
    "feature_sets",
    "load_table",
    "serving",
    "shipped_directory",
    "unmeasured",
    "user_directory",
]


# Where a family has no table of a GPU's own: that of a GPU whose instructions it has too, as far as
# the kernels use them, with at least as much shared memory as those rows take. Each GPU has compile
# reports of its own.
_TABLE_OF: Mapping[str, str] = {
    "nvidia_sm103": "nvidia_sm100",
    "nvidia_sm100": "nvidia_sm80",
    "nvidia_sm86": "nvidia_sm80",
    "nvidia_sm89": "nvidia_sm86",
    "nvidia_sm120": "nvidia_sm86",
    "nvidia_sm121": "nvidia_sm86",
    "amd_gfx90a": "amd_gfx942",
    "amd_gfx950": "amd_gfx942",
}
# GPUs that cannot have a table yet, and why: the end of a sentence.
_WITHOUT: Mapping[str, str] = {
    "amd_gfx1250": "Triton 3.6.0 does not assemble the kernels for it (amdgpu_user_sgpr_count is"
    " smaller than what the enabled user SGPRs imply)",
}


@dataclass(frozen=True)
class PathTable:
    """The rows of one table file, in the file's order.

    Attributes:
        schema: what the family's tables may hold.
        source: the file that the rows were read from.
    """

    schema: TableSchema
    source: Path
    rows: tuple[Row, ...]

    @property
    def family(self) -> str:
        return self.schema.family


@dataclass(frozen=True)
class Verdict:
    """The grids that one table row serves in a selection, or why it serves none.

    Attributes:
        low, high: the grids it serves, inclusive; ``high`` is ``None`` where there is no limit and
            both are ``None`` where it serves none.
        refusal: why it serves none, else ``None``.
    """

    row: Row
    low: int | None
    high: int | None
    refusal: str | None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.row.operator} {self.row.name}: refused, {self.refusal}"
        grids = f"grid {self.low} to {self.high}" if self.high else f"grid {self.low} and more"
        grids += limits_in_words(*(getattr(self.row, limit) for limit in LIMITS))
        params = self.row.params_dict()
        chosen = [self.row.name, *(f"{key}={value}" for key, value in params.items())]
        return f"{self.row.operator} {grids}: {' '.join(chosen)} ({self.row.provenance})"


def load_table(schema: TableSchema, target: Target, *, directory: Path | None = None) -> PathTable:
    """Read the table of a family for ``target``.

    Args:
        schema: the family's operators and their parameters.
        directory: look only here, for ``<family>/<target.key>.toml`` and then for the tables that
            such a GPU may share, instead of for each in the user's directory and in the package.

    Raises:
        LookupError: there is no table for this target.
        ValueError: the table is malformed or cannot be read; the message names file and row.
    """
    family = schema.family
    own = [directory] if directory is not None else [user_directory(), shipped_directory()]
    roots = [root for root in own if root is not None]
    stem: str | None = target.key
    while stem is not None:
        for root in roots:
            file = root / family / f"{stem}.toml"
            if _is_there(file):
                rows = parse_table(file, schema)
                if stem != target.key and root == roots[-1]:  # a user's was tuned on this machine
                    rows = tuple(_measured_elsewhere(row) for row in rows)
                return PathTable(schema, file, rows)
        stem = _TABLE_OF.get(stem)
    looked = ", ".join(str(root / family) for root in roots)
    missing = f"no {family} kernel paths for {target.arch}: no {target.key}.toml in {looked}"
    why = _WITHOUT.get(target.key)
    raise LookupError(missing if why is None else f"{missing}; {why}")


def _is_there(file: Path) -> bool:
    """Whether there is such a table.

    A folder that this user may not read holds no table for them; logged once.

    Raises:
        ValueError: something of that name is there and is no file.
    """
    try:
        if stat.S_ISREG(os.stat(file).st_mode):
            return True
    except (FileNotFoundError, NotADirectoryError):
        if not file.is_symlink():
            return False
    except OSError as error:
        if os.environ.get("KDA_DSV4_CONFIG_DIR"):
            raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
        warn_once(f"no tables of yours are read from {file.parent}: {error.strerror}")
        return False
    raise ValueError(f"{file}: must be a file, got a folder, a pipe or a link to nothing")


def _measured_elsewhere(row: Row) -> Row:
    if not row.measured:
        return row
    return replace(row, measured=False, provenance=f"not measured here, {row.provenance}")


def unmeasured(target: Target, selections: Iterable[Any]) -> str | None:
    """One sentence for the log at model load, where no path chosen on a GPU was measured on one of
    its architecture; ``None`` elsewhere, and on a CPU, whose path has no parameters."""
    paths = [row for s in selections for row in s.rows]
    if target.vendor == "cpu" or any(path.measured for path in paths):
        return None
    return (
        f"no launch parameters of these paths were measured on {target.name} ({target.arch}):"
        " kda-dsv4 check tells whether they are right here, kda-dsv4 tune searches faster ones"
    )


def explain(
    table: PathTable,
    operator: str,
    requires: frozenset[str] = frozenset(),
    *,
    upstream: str | None = None,
) -> tuple[Verdict, ...]:
    """The verdict on each row of ``operator`` for a model that needs ``requires``, in table order.

    Args:
        upstream: the engine's kernel that the caller can run instead of a row.

    Raises:
        ValueError: the family has no such operator.
    """
    table.schema.operator(operator)
    declared = [row for row in table.rows if row.operator == operator]
    refusals = [_refusal(row, requires, upstream) for row in declared]
    usable: list[int] = []
    for number, row in enumerate(declared):
        if refusals[number] is None:
            before = declared[usable[-1]] if usable else None
            if before is not None and _covers(before, row):
                refusals[number] = f"{before.name} is preferred for the same grids"
            else:
                usable.append(number)
    while usable and declared[usable[-1]].is_limited:
        refusals[usable.pop()] = "no row is left for calls beyond its limits"
    # Only the last usable row can be open, and it is, whatever its max_grid says.
    bounds = [declared[number].max_grid for number in usable[:-1]] + [None]
    verdicts, low = [], 1
    for number, (row, refusal) in enumerate(zip(declared, refusals, strict=True)):
        if refusal is not None:
            verdicts.append(Verdict(row, None, None, refusal))
            continue
        high = bounds[usable.index(number)]
        verdicts.append(Verdict(row, low, high, None))
        if high is not None and not row.is_limited:
            low = high + 1
    return tuple(verdicts)


def serving(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts on rows that are not refused."""
    return [verdict for verdict in verdicts if verdict.refusal is None]


def _covers(before: Row, row: Row) -> bool:
    """Whether a row, which stands before another, leaves nothing to it."""
    if before.max_grid != row.max_grid:
        return False
    limits = [(getattr(before, limit), getattr(row, limit)) for limit in LIMITS]
    return not before.is_limited or all(theirs == mine for theirs, mine in limits)


def feature_sets(table: PathTable, operator: str) -> list[frozenset[str]]:
    """The kinds of model that an operator's rows are written for: their distinct feature sets."""
    return list(dict.fromkeys(row.features for row in table.rows if row.operator == operator))


def _refusal(row: Row, requires: frozenset[str], upstream: str | None) -> str | None:
    if row.name == UPSTREAM and row.params.kernel != upstream:
        return f"only where {row.params.kernel} can run instead"
    if missing := requires - row.features:
        return f"lacks {', '.join(sorted(missing))}"
    return None


def user_directory() -> Path | None:
    """Where a user's tables are looked for; it need not exist unless an environment variable names
    it. ``None`` for a user who has no home.

    Raises:
        ValueError: ``KDA_DSV4_CONFIG_DIR`` names no directory.
    """
    if configured := os.environ.get("KDA_DSV4_CONFIG_DIR"):
        if not os.path.isdir(configured):  # Path's raises where a folder above is closed
            raise ValueError(f"KDA_DSV4_CONFIG_DIR must name a directory, got {configured}")
        return Path(configured)
    try:
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    except RuntimeError:
        return None
    return Path(base) / "kda-dsv4"


def shipped_directory() -> Path:
    """Where the package's own tables are."""
    spec = importlib.util.find_spec("backend_core.configs")
    if spec is None or not spec.submodule_search_locations:
        # A source tree that was not installed has its tables beside this package.
        return Path(__file__).resolve().parents[2] / "configs"
    return Path(spec.submodule_search_locations[0])
