"""Reading one path table: TOML to typed rows, or a ``ValueError`` that names file and row.

A family declares its operators once (`TableSchema`): what one unit of a table's grid counts, and
for each kernel path the frozen dataclass of its launch parameters. Every row of a table file is
parsed into that dataclass when the table loads, so a wrong key, value or type never reaches a
launch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend_core import __version__
from backend_core.bounded import TABLE_BYTES, parse_toml, read_text


@dataclass(frozen=True)
class NoParams:
    """The launch parameters of a path that has none."""


@dataclass(frozen=True)
class Operator:
    """One operator of a family, as the path tables know it.

    Attributes:
        name: as in the rows' ``operator``, for instance ``"prefill"``.
        grid: in words, what one unit of a row's ``max_grid`` counts.
        paths: for each path name, the frozen dataclass of its launch parameters, or the name of the
            section that holds them once for the whole file. The dataclass's fields are ``int``,
            ``bool``, ``str`` or ``Literal``; a field with a default may be left out of a row; a
            field with the name of a section is that section; its ``__post_init__`` may refuse
            values with a ``ValueError``.
    """

    name: str
    grid: str
    paths: Mapping[str, type[Any] | str] = field(hash=False)


@dataclass(frozen=True)
class TableSchema:
    """What the path tables of one family may hold.

    Attributes:
        family: the family's name, which is also the folder of its tables.
        operators: every operator, each of which every table has rows for.
        sections: further top-level tables, each at most once per file, that paths take their
            parameters from: the frozen dataclass that each is parsed into.
        folder: holds the shipped tables, ``<family>/<target.key>.toml``, of a family whose package
            is not one of ours; ``None`` for ours.
    """

    family: str
    operators: tuple[Operator, ...]
    sections: Mapping[str, type[Any]] = field(default_factory=dict, hash=False)
    folder: Path | None = None

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
    "requires_package": str,
    "features": list,
    "measured": bool,
    "source": str,
    "gpu": str,
    "date": str,
    "params": dict,
}
_REQUIRED = ("operator", "name", "features", "measured", "source")


@dataclass(frozen=True)
class KernelPath:
    """A named way to run one operator, with its launch parameters.

    Attributes:
        max_grid: the largest grid that the row is meant for; ``None`` is no limit.
        features: what the path can do; a call whose needs exceed it is refused.
        params: launch parameters, an instance of the operator's dataclass for this path.
        measured: whether the parameters were chosen by measuring on this architecture.
        provenance: GPU, date and result file of that measurement, or what stands in for it.
        requires_package: the importable package that the path calls, if it is not one of ours.
    """

    name: str
    operator: str
    max_grid: int | None
    features: frozenset[str]
    params: Any
    measured: bool
    provenance: str
    requires_package: str | None = None

    def __post_init__(self) -> None:
        # every call looks its kernels up by path: hashing all fields would take a microsecond
        object.__setattr__(self, "_hash", hash((self.name, self.operator, self.max_grid)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def params_dict(self) -> dict[str, int | bool | str]:
        """The launch parameters by name, for reports; without sections that paths share."""
        params = dataclasses.asdict(self.params)
        return {name: value for name, value in params.items() if not isinstance(value, dict)}


def parse_table(file: Path, schema: TableSchema, stem: str) -> tuple[KernelPath, ...]:
    """The rows of ``file``, which must be the table of ``schema.family`` for ``stem``, in order.

    Raises:
        ValueError: it cannot be read, is not TOML, has an unknown or missing key or a value of the
            wrong type, belongs to another family or architecture, or an operator's rows do not
            cover every grid in ascending order. The message is one sentence with file and row.
    """
    try:
        document = parse_toml(read_text(file, TABLE_BYTES))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid TOML: {error}") from None
    if unknown := document.keys() - {"table", "path"} - schema.sections.keys():
        raise ValueError(f"{file}: unknown key {_names(unknown)}")
    _check_header(file, document.get("table"), schema.family, stem)
    entries = document.get("path", [])
    if not isinstance(entries, list):
        raise ValueError(f"{file}: path must be an array of tables ([[path]])")
    sections = {
        name: _parse_params(f"{file}: {name}", kind, document[name])
        for name, kind in schema.sections.items()
        if name in document
    }
    rows = tuple(
        _parse_row(f"{file}: path {number}", entry, schema, sections)
        for number, entry in enumerate(entries, start=1)
    )
    for name in schema.operator_names:
        _check_cover(
            file, name, [(n, row) for n, row in enumerate(rows, 1) if row.operator == name]
        )
    return rows


def _check_header(file: Path, header: object, family: str, stem: str) -> None:
    vendor, _, arch = stem.partition("_")
    expected = {"family": family, "vendor": vendor, "arch": arch or vendor}
    if isinstance(header, dict) and "release" in header:
        if header["release"] != __version__:
            raise ValueError(
                f"{file}: written for release {header['release']}, this is {__version__}: run "
                "kda-dsv4 tune again, or remove it"
            )
        header = {key: value for key, value in header.items() if key != "release"}
    if header != expected:
        raise ValueError(f"{file}: [table] must be {expected}, got {header}")


def _parse_row(
    where: str, entry: object, schema: TableSchema, sections: Mapping[str, Any]
) -> KernelPath:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be a table, got {entry!r}")
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
    if entry["name"] not in operator.paths:
        known = ", ".join(operator.paths)
        raise ValueError(
            f"{where}: name of a {operator.name} path must be one of {known}, got {entry['name']!r}"
        )
    if entry.get("max_grid", 1) < 1:
        raise ValueError(f"{where}: max_grid must be at least 1, got {entry['max_grid']}")
    if not entry.get("requires_package", "top_level").isidentifier():
        raise ValueError(
            f"{where}: requires_package must be a top-level package, got "
            f"{entry['requires_package']!r}"
        )
    for feature in entry["features"]:
        if not isinstance(feature, str):
            raise ValueError(f"{where}: features must be strings, got {feature!r}")
    return KernelPath(
        name=entry["name"],
        operator=entry["operator"],
        max_grid=entry.get("max_grid"),
        features=frozenset(entry["features"]),
        params=_row_params(where, entry, operator.paths[entry["name"]], sections),
        measured=entry["measured"],
        provenance=_provenance(where, entry),
        requires_package=entry.get("requires_package"),
    )


def _row_params(
    where: str, entry: Mapping[str, Any], kind: type[Any] | str, sections: Mapping[str, Any]
) -> Any:
    if not isinstance(kind, str):
        shared = {f.name: sections[f.name] for f in dataclasses.fields(kind) if f.name in sections}
        return _parse_params(f"{where}: params", kind, entry.get("params", {}), shared)
    if "params" in entry:
        raise ValueError(f"{where}: {entry['name']} takes its parameters from [{kind}], not params")
    if kind not in sections:
        raise ValueError(f"{where}: {entry['name']} needs the table [{kind}]")
    return sections[kind]


def _parse_params(
    where: str, kind: type[Any], values: object, shared: Mapping[str, Any] | None = None
) -> Any:
    """An instance of the frozen dataclass ``kind`` from a TOML table.

    ``shared``: fields that are sections of the file, which the table must not have.

    Raises:
        ValueError: an unknown, missing or wrongly typed key, or a value that ``kind`` refuses.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: must be a table, got {values!r}")
    shared = shared or {}
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name not in shared}
    if unknown := values.keys() - hints.keys():
        known = ", ".join(hints) or "none"
        raise ValueError(f"{where}: unknown key {_names(unknown)}; {kind.__name__} has {known}")
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    if missing := required - values.keys() - shared.keys():
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
        return kind(**values, **shared)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _provenance(where: str, entry: Mapping[str, Any]) -> str:
    if not entry["measured"]:
        return f"not measured, {entry['source']}"
    if missing := {"gpu", "date"} - entry.keys():
        raise ValueError(f"{where}: measured = true needs {_names(missing)}")
    return f"{entry['gpu']}, {entry['date']}, {entry['source']}"


def _check_cover(file: Path, operator: str, rows: list[tuple[int, KernelPath]]) -> None:
    if not rows or rows[-1][1].max_grid is not None:
        where = f" {rows[-1][0]}" if rows else ""
        raise ValueError(f"{file}: path{where}: the last {operator} row must have no max_grid")
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
