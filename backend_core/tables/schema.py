"""Reading one path table: TOML to typed rows, or a ``ValueError`` that names file and row.

A family declares its operators once (`TableSchema`): what one unit of a table's grid counts, and
for each kernel path the frozen dataclass of its launch parameters. Every row of a table file is
parsed into that dataclass when the table loads, so a wrong key, value or type never reaches a
launch.
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend_core import __version__
from backend_core.bounded import TABLE_BYTES, parse_toml, read_text
from backend_core.target import Target


@dataclass(frozen=True)
class NoParams:
    """The launch parameters of a path that has none."""


UPSTREAM = "upstream"
"""The name of rows that leave a call to the engine's own kernel."""
TORCH = "torch"
"""The name of the path that runs no kernel, on a CPU."""


@dataclass(frozen=True)
class UpstreamParams:
    """The row is faster by the engine's own kernel: ``kernel``, as adapters name it."""

    kernel: str


@dataclass(frozen=True)
class Operator:
    """An operator: permitted contents of its tables, a layer's demands on its rows, its paths.

    Attributes:
        name: as in the rows' ``operator``, for instance ``"prefill"``.
        grid: in words, what one unit of a row's ``max_grid`` counts.
        paths: for each path name, the frozen dataclass of its launch parameters. Its fields are
            ``int``, ``bool``, ``str`` or ``Literal``; a field with a default may be left out of a
            row; its ``__post_init__`` may refuse values with a ``ValueError``.
        folder: the package that has a module for each path, by the path's name.
        features: for each path name what the path can do, in one string; a row may take away.
        requires: the features that a row must have to serve a layer.
        unit_tokens: tokens of a sequence that count once in the grid; 1 where it counts none.
    """

    name: str
    grid: str
    paths: Mapping[str, type[Any]] = field(hash=False)
    folder: str = ""
    requires: Callable[[Any], frozenset[str]] = field(default=lambda spec: frozenset(), hash=False)
    unit_tokens: int = 1
    features: Mapping[str, str] = field(default_factory=dict, hash=False)

    def bind(self, row: Row, spec: object, target: Target) -> Callable[..., Any]:
        """The function that runs calls of such layers on a path; compiles what it needs.

        Raises:
            LookupError: the row leaves the call to upstream.
        """
        if row.name == UPSTREAM:
            raise LookupError(
                f"{self.name} of this size is left to {row.params.kernel} ({row.provenance})"
            )
        bound: Callable[..., Any] = importlib.import_module(f"{self.folder}.{row.name}").bind(
            row, spec, target
        )
        return bound


@dataclass(frozen=True)
class TableSchema:
    """The permitted contents of one family's path tables.

    Attributes:
        family: the family's name, which is also the folder of its tables.
        operators: every operator, each of which every table has rows for.
    """

    family: str
    operators: tuple[Operator, ...]

    @property
    def operator_names(self) -> tuple[str, ...]:
        return tuple(operator.name for operator in self.operators)

    def operator(self, name: str) -> Operator:
        """The operator of that name.

        Raises:
            ValueError: the family has none.
        """
        for operator in self.operators:
            if operator.name == name:
                return operator
        known = ", ".join(self.operator_names)
        raise ValueError(f"operator of {self.family} must be one of {known}, got {name!r}")


_ROW_KEYS = {
    "operator": str,
    "name": str,
    "max_grid": int,
    "max_longest": int,
    "min_longest": int,
    "max_width": int,
    "features": list,
    "source": str,
    "gpu": str,
    "date": str,
    "params": dict,
}
_REQUIRED = ("operator", "name", "source")
_OF_TABLE = ("source", "gpu")  # said once for the rows that do not say them
LIMITS = ("max_longest", "min_longest", "max_width")
"""Limits that a row sets to a call's sequences, whose lengths the host must know."""


@dataclass(frozen=True)
class Row:
    """A row of a path table: a path of one operator, with its launch parameters.

    Attributes:
        max_grid: the largest grid that the row is meant for; ``None`` is no limit.
        max_longest, min_longest: tokens of the longest sequence. A row with one of the limits
            serves only calls whose lengths the host knows; a row without follows for the others.
        max_width: the most heads times sequences as long as the longest, if all tokens of the call
            were in such sequences.
        features: what the path can do, as far as the row uses it; a call whose needs exceed that
            is refused.
        params: launch parameters, an instance of the operator's dataclass for this path.
        measured: whether the parameters were chosen by measuring on this architecture.
        provenance: GPU, date and result file of that measurement, or what stands in for it.
    """

    name: str
    operator: str
    max_grid: int | None
    features: frozenset[str]
    params: Any
    measured: bool
    provenance: str
    max_longest: int | None = None
    min_longest: int | None = None
    max_width: int | None = None
    is_limited: bool = field(init=False, repr=False, compare=False)
    """Whether the row serves only some calls of its grids."""

    def serves(self, grid: int, longest: int | None, unit_tokens: int) -> bool:
        """Whether a call is within the limits but for ``max_grid``.

        Args:
            longest: tokens of its longest sequence; ``None`` where the host does not know them.
            unit_tokens: of a sequence, that count once in the grid.
        """
        if not self.is_limited:
            return True
        if longest is None:
            return False
        if self.max_longest is not None and longest > self.max_longest:
            return False
        if self.min_longest is not None and longest < self.min_longest:
            return False
        share = max(1, -(-longest // unit_tokens))
        return self.max_width is None or grid // share <= self.max_width

    def __post_init__(self) -> None:
        is_limited = any(getattr(self, limit) is not None for limit in LIMITS)
        object.__setattr__(self, "is_limited", is_limited)
        # every call looks its kernels up by path: hashing all fields would take a microsecond
        object.__setattr__(self, "_hash", hash((self.name, self.operator, self.max_grid)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    @property
    def is_kernel(self) -> bool:
        """Whether the path launches kernels of this package."""
        return self.name not in (TORCH, UPSTREAM)

    def params_dict(self) -> dict[str, int | bool | str]:
        """The launch parameters by name, for reports."""
        return dataclasses.asdict(self.params)


def limits_in_words(max_longest: int | None, min_longest: int | None, max_width: int | None) -> str:
    """A row's limits, each after a comma."""
    words = []
    if max_longest is not None:
        words.append(f", sequences of up to {max_longest} tokens")
    if min_longest is not None:
        words.append(f", a sequence of at least {min_longest} tokens")
    if max_width is not None:
        words.append(f", at most {max_width} heads times one such sequence")
    return "".join(words)


def parse_table(file: Path, schema: TableSchema) -> tuple[Row, ...]:
    """The rows of a table of the family, in order.

    Raises:
        ValueError: it cannot be read, is not TOML, has an unknown or missing key or a value of the
            wrong type, was written for another release, or an operator's rows do not cover every
            grid in ascending order. The message is one sentence with file and row.
    """
    document = read_document(file)
    if unknown := document.keys() - {*_OF_TABLE, "release", "path"}:
        raise ValueError(f"{file}: unknown key {_names(unknown)}")
    if (release := document.get("release", __version__)) != __version__:
        raise ValueError(
            f"{file}: written for release {release}, this is {__version__}: run kda-dsv4 tune"
            " again, or remove it"
        )
    default: dict[str, Any] = {key: document[key] for key in _OF_TABLE if key in document}
    rows = tuple(
        _parse_row(f"{file}: path {number}", entry, schema, default)
        for number, entry in enumerate(document["path"], start=1)
    )
    for name in schema.operator_names:
        _check_cover(
            file, name, [(n, row) for n, row in enumerate(rows, 1) if row.operator == name]
        )
    return rows


def read_document(file: Path) -> dict[str, Any]:
    """A table as TOML has it, with all of its rows.

    A table with ``like = "nvidia_sm80"`` has the keys and rows of that table of its folder, none of
    which may be measured. Its own ``[[path]]`` entries change keys and launch parameters of the row
    with their operator and name.

    Raises:
        ValueError: it cannot be read, is not TOML, or is not so related to another.
    """
    document = _read(file)
    if "like" not in document:
        return document
    like = document.pop("like")
    if not isinstance(like, str) or not like.isidentifier():
        raise ValueError(f"{file}: like must name another table of the folder, got {like!r}")
    base = _read(file.with_name(f"{like}.toml"))
    rows = [row for row in base["path"] if isinstance(row, dict)]
    if "like" in base or any("date" in row for row in rows):
        raise ValueError(
            f"{file}: like must name a table with rows of its own that were not measured, got"
            f" {like!r}"
        )
    for number, entry in enumerate(document["path"], start=1):
        where = f"{file}: path {number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("params", {}), dict):
            raise ValueError(f"{where}: it and its params must be tables, got {entry!r}")
        key = entry.get("operator"), entry.get("name")
        found = [row for row in rows if (row.get("operator"), row.get("name")) == key]
        if len(found) != 1:
            raise ValueError(
                f"{where}: {like}.toml must have one row of its operator and name, has {len(found)}"
            )
        (row,) = found
        row |= {**entry, "params": {**row.get("params", {}), **entry.get("params", {})}}
    return {**base, **document, "path": base["path"]}


def _read(file: Path) -> dict[str, Any]:
    try:
        document = parse_toml(read_text(file, TABLE_BYTES))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid TOML: {error}") from None
    if not isinstance(document.setdefault("path", []), list):
        raise ValueError(f"{file}: path must be an array of tables ([[path]])")
    return document


def _parse_row(where: str, given: object, schema: TableSchema, default: dict[str, Any]) -> Row:
    if not isinstance(given, dict):
        raise ValueError(f"{where}: must be a table, got {given!r}")
    entry = default | given
    if unknown := entry.keys() - _ROW_KEYS.keys():
        raise ValueError(f"{where}: unknown key {_names(unknown)}")
    if missing := set(_REQUIRED) - entry.keys():
        raise ValueError(f"{where}: missing key {_names(missing)}")
    for key, value in entry.items():
        # Exact types: TOML's true is not an integer.
        if type(value) is not _ROW_KEYS[key]:
            raise ValueError(f"{where}: {key} must be {_ROW_KEYS[key].__name__}, got {value!r}")
    try:
        operator = schema.operator(entry["operator"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    kind = UpstreamParams if entry["name"] == UPSTREAM else operator.paths.get(entry["name"])
    if kind is None:
        known = ", ".join(operator.paths)
        raise ValueError(
            f"{where}: name of a {operator.name} path must be one of {known}, got {entry['name']!r}"
        )
    for limit in ("max_grid", *LIMITS):
        if entry.get(limit, 1) < 1:
            raise ValueError(f"{where}: {limit} must be at least 1, got {entry[limit]}")
    return Row(
        name=entry["name"],
        operator=entry["operator"],
        max_grid=entry.get("max_grid"),
        features=_features(where, entry, operator),
        params=_parse_params(f"{where}: params", kind, entry.get("params", {})),
        measured="date" in entry,
        provenance=_provenance(where, entry, given),
        **{limit: entry.get(limit) for limit in LIMITS},
    )


def _features(where: str, entry: Mapping[str, Any], operator: Operator) -> frozenset[str]:
    """The path's, or those of them that the row names; a row of upstream's names its own."""
    name, given = entry["name"], entry.get("features")
    for feature in given or ():
        if not isinstance(feature, str):
            raise ValueError(f"{where}: features must be strings, got {feature!r}")
    if name == UPSTREAM:
        return frozenset(given or ())
    own = frozenset(operator.features.get(name, "").split())
    if given is None:
        return own
    if unknown := set(given) - own:
        has = f"has {_names(set(own))}" if own else "has none"
        raise ValueError(
            f"{where}: features must be of the {operator.name} path {name}, which {has};"
            f" got {_names(unknown)}"
        )
    return frozenset(given)


def _parse_params(where: str, kind: type[Any], values: object) -> Any:
    """An instance of the frozen dataclass ``kind`` from a TOML table.

    Raises:
        ValueError: an unknown, missing or wrongly typed key, or a value that ``kind`` refuses.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: must be a table, got {values!r}")
    hints = typing.get_type_hints(kind)
    if unknown := values.keys() - hints.keys():
        known = ", ".join(hints) or "none"
        raise ValueError(f"{where}: unknown key {_names(unknown)}; {kind.__name__} has {known}")
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    if missing := required - values.keys():
        raise ValueError(f"{where}: missing key {_names(missing)}")
    for key, value in values.items():
        choices = typing.get_args(hints[key])
        if choices:
            if value not in choices or type(value) is not type(choices[0]):
                allowed = ", ".join(repr(choice) for choice in choices)
                raise ValueError(f"{where}.{key} must be one of {allowed}, got {value!r}")
        elif type(value) is not hints[key]:
            raise ValueError(f"{where}.{key} must be {hints[key].__name__}, got {value!r}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _provenance(where: str, entry: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    if "gpu" not in own and "date" not in own:
        return f"not measured, {entry['source']}"
    if missing := {"gpu", "date"} - entry.keys():
        raise ValueError(f"{where}: a measured row needs {_names(missing)} too")
    return f"{entry['gpu']}, {entry['date']}, {entry['source']}"


def _check_cover(file: Path, operator: str, rows: list[tuple[int, Row]]) -> None:
    last = rows[-1][1] if rows else None
    for limit in ("max_grid", *LIMITS):
        if last is None or getattr(last, limit) is not None:
            where = f" {rows[-1][0]}" if rows else ""
            raise ValueError(f"{file}: path{where}: the last {operator} row must have no {limit}")
    previous: int | None = 0
    for number, row in rows:
        bound = row.max_grid
        if bound is not None and previous is None:
            raise ValueError(
                f"{file}: path {number}: a {operator} row without max_grid precedes it"
            )
        if bound is not None and previous is not None and bound < previous:
            raise ValueError(
                f"{file}: path {number}: max_grid must not decrease, got {bound} after {previous}"
            )
        previous = bound


def _names(keys: set[str]) -> str:
    return ", ".join(sorted(keys))
