"""Kernel paths as data: TOML tables with provenance, one selection at model load, a bisect a call.

A table serves one family of operators on one architecture. Its ``[[path]]`` rows name, for each
operator, which path runs up to which grid and with which launch parameters:

    [table]
    family = "kda"
    vendor = "nvidia"
    arch = "sm90"

    [[path]]
    operator = "recurrent"
    name = "recurrent"
    max_grid = 264                # serves grids up to and including this one
    features = ["bounded_gate"]
    measured = true
    source = "benchmarks/results/kda_decode_h200.json"
    gpu = "NVIDIA H200"
    date = "2026-11-21"
    [path.params]                 # the fields of the path's dataclass (`schema.Operator.paths`)
    block_v = 32

Rows of one operator come in ascending ``max_grid``; the last has none and is open. Rows with the
same ``max_grid`` are alternatives for one bucket, the preferred first (for instance a path that
``requires_package``, then one that always runs).

A table that was written for one release of the package (``kda-dsv4 tune``) says so with
``release = "0.1.0"`` under ``[table]``; another release refuses it, since launch parameters come
and go with the kernels.

Tables are looked up in ``$KDA_DSV4_CONFIG_DIR`` (by default ``$XDG_CONFIG_HOME/kda-dsv4``), then
among those that ship with the package; the first file found is used whole.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from backend_core.tables.schema import KernelPath, TableSchema, parse_table
from backend_core.target import Target

__all__ = [
    "KernelPath",
    "PathRow",
    "PathSelection",
    "PathTable",
    "explain",
    "feature_sets",
    "load_table",
    "select",
    "shipped_directory",
    "shipped_with",
    "unmeasured",
    "user_directory",
]

logger = logging.getLogger("kda_dsv4")

# Where a family has no table of a GPU's own: that of a GPU whose instructions it has too, as far as
# the kernels use them, with at least as much shared memory as those rows take. Each GPU has compile
# reports of its own.
_TABLE_OF: Mapping[str, str] = {
    "nvidia_sm103": "nvidia_sm100",
    "nvidia_sm86": "nvidia_sm80",
    "nvidia_sm89": "nvidia_sm86",
    "nvidia_sm120": "nvidia_sm86",
    "nvidia_sm121": "nvidia_sm86",
    "amd_gfx90a": "amd_gfx942",
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
    rows: tuple[KernelPath, ...]

    @property
    def family(self) -> str:
        return self.schema.family


@dataclass(frozen=True)
class PathRow:
    """What became of one table row in a selection.

    Attributes:
        low, high: the grids it serves, inclusive; ``high`` is ``None`` where there is no limit and
            both are ``None`` where it serves none.
        refusal: why it serves none, else ``None``.
    """

    path: KernelPath
    low: int | None
    high: int | None
    refusal: str | None

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"{self.path.operator} {self.path.name}: refused, {self.refusal}"
        grids = f"grid {self.low} to {self.high}" if self.high else f"grid {self.low} and more"
        params = self.path.params_dict()
        chosen = [self.path.name, *(f"{key}={value}" for key, value in params.items())]
        return f"{self.path.operator} {grids}: {' '.join(chosen)} ({self.path.provenance})"


@dataclass(frozen=True)
class PathSelection:
    """The rows of one operator that can serve a model's calls; built once, at model load.

    A bucket whose rows were all refused is taken over by the next larger bucket, and above the
    largest usable row that row itself goes on: launch parameters chosen for more parallel work are
    the closest ones known to run.
    """

    operator: str
    paths: tuple[KernelPath, ...]
    _bounds: tuple[int, ...]
    _rows: tuple[PathRow, ...] = field(repr=False)

    def lookup(self, grid: int) -> KernelPath:
        """The path for a launch of ``grid`` units (what a unit is, the family defines)."""
        return self.paths[bisect_left(self._bounds, grid)]

    @classmethod
    def of(cls, *paths: KernelPath) -> PathSelection:
        """The given rows of one operator alone, whatever they require: a forced choice.

        Only the last may be without ``max_grid``; above it the last serves.
        """
        bounds = tuple(path.max_grid for path in paths[:-1] if path.max_grid is not None)
        return cls(paths[0].operator, paths, bounds, ())

    def explain(self) -> Iterator[PathRow]:
        """One entry for each row of the table's operator, in the table's order."""
        return iter(self._rows)


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
    own = [directory] if directory is not None else [user_directory(), shipped_with(schema)]
    roots = [root for root in own if root is not None]
    stem: str | None = target.key
    while stem is not None:
        for root in roots:
            file = root / family / f"{stem}.toml"
            if _is_there(file):
                rows = parse_table(file, schema, stem)
                if stem != target.key and root == roots[-1]:  # a user's was tuned on this machine
                    rows = tuple(_measured_elsewhere(row) for row in rows)
                return PathTable(schema, file, rows)
        stem = _TABLE_OF.get(stem)
    looked = ", ".join(str(root / family) for root in roots)
    missing = f"no {family} kernel paths for {target.arch}: no {target.key}.toml in {looked}"
    why = _WITHOUT.get(target.key)
    raise LookupError(missing if why is None else f"{missing}; {why}")


def _is_there(file: Path) -> bool:
    """Whether there is such a table. In a folder of somebody else, which a user who has another's
    home finds there, there is none of theirs; that is logged once."""
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if os.environ.get("KDA_DSV4_CONFIG_DIR"):
            raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
        _say_once(f"no tables of yours are read from {file.parent}: {error.strerror}")
        return False


@functools.cache
def _say_once(text: str) -> None:
    logger.warning(text)


def _measured_elsewhere(row: KernelPath) -> KernelPath:
    if not row.measured:
        return row
    return replace(row, measured=False, provenance=f"not measured here, {row.provenance}")


def unmeasured(target: Target, selections: Iterable[PathSelection]) -> str | None:
    """One sentence for the log at model load, where no path chosen on a GPU was measured on one of
    its architecture; ``None`` elsewhere, and on a CPU, whose path has no parameters."""
    paths = [path for selection in selections for path in selection.paths]
    if target.vendor == "cpu" or any(path.measured for path in paths):
        return None
    return (
        f"no launch parameters of these paths were measured on {target.name} ({target.arch}):"
        " kda-dsv4 check tells whether they are right here, kda-dsv4 tune searches faster ones"
    )


def explain(
    table: PathTable, operator: str, requires: frozenset[str] = frozenset()
) -> tuple[PathRow, ...]:
    """What each row of ``operator`` does for a model that needs ``requires``, in the table's order.

    Raises:
        ValueError: the family has no such operator.
    """
    table.schema.operator(operator)
    declared = [row for row in table.rows if row.operator == operator]
    refusals: list[str | None] = []
    usable: list[KernelPath] = []
    for row in declared:
        refusal = _refusal(row, requires)
        if refusal is None and usable and usable[-1].max_grid == row.max_grid:
            refusal = f"{usable[-1].name} is preferred for the same grids"
        if refusal is None:
            usable.append(row)
        refusals.append(refusal)
    # Only the last usable row can be open, and it is, whatever its max_grid says.
    bounds = [row.max_grid for row in usable[:-1] if row.max_grid is not None]
    buckets = zip([1, *(bound + 1 for bound in bounds)], [*bounds, None], strict=True)
    return tuple(
        PathRow(row, *next(buckets), None) if refusal is None else PathRow(row, None, None, refusal)
        for row, refusal in zip(declared, refusals, strict=True)
    )


def feature_sets(table: PathTable, operator: str) -> list[frozenset[str]]:
    """The kinds of model that an operator's rows are written for: their distinct feature sets."""
    return list(dict.fromkeys(row.features for row in table.rows if row.operator == operator))


def select(
    table: PathTable, operator: str, requires: frozenset[str] = frozenset()
) -> PathSelection:
    """Choose, for every grid, the first row of ``operator`` that has all features in ``requires``.

    Raises:
        LookupError: no row is left; the message gives the refusals.
        ValueError: the family has no such operator.
    """
    rows = explain(table, operator, requires)
    served = [row for row in rows if row.refusal is None]
    if not served:
        why = "; ".join(dict.fromkeys(f"{row.path.name} {row.refusal}" for row in rows))
        raise LookupError(f"no {operator} path in {table.source} can serve this model: {why}")
    bounds = tuple(row.high for row in served if row.high is not None)
    return PathSelection(operator, tuple(row.path for row in served), bounds, rows)


def _refusal(row: KernelPath, requires: frozenset[str]) -> str | None:
    if missing := requires - row.features:
        return f"lacks {', '.join(sorted(missing))}"
    if row.requires_package is not None and not _is_installed(row.requires_package):
        return f"needs the package {row.requires_package}, which is not installed"
    return None


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


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


def shipped_with(schema: TableSchema) -> Path:
    """Where a family's package has its own tables."""
    return schema.folder or shipped_directory()


def shipped_directory() -> Path:
    """Where the package's own tables are."""
    spec = importlib.util.find_spec("backend_core.configs")
    if spec is None or not spec.submodule_search_locations:
        # A source tree that was not installed has its tables beside this package.
        return Path(__file__).resolve().parents[2] / "configs"
    return Path(spec.submodule_search_locations[0])
