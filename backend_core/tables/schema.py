"""Reading one path table: TOML to rows, or a ``ValueError`` that names file and row."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backend_core import __version__

# The phases each family's tables must have rows for.
PHASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"kda": ("prefill", "decode"), "dsv4": ("prefill", "decode")}
)

_ROW_KEYS = {
    "phase": str,
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
_REQUIRED = ("phase", "name", "features", "measured", "source")


@dataclass(frozen=True)
class KernelPath:
    """A named way to run one phase, with its launch parameters.

    Attributes:
        max_grid: the largest grid that the row is meant for; ``None`` is no limit.
        features: what the path can do; a call whose needs exceed it is refused.
        params: launch parameters, read-only.
        measured: whether the parameters were chosen by measuring on this architecture.
        provenance: GPU, date and result file of that measurement, or what stands in for it.
        requires_package: the importable package that the path calls, if it is not one of ours.
    """

    name: str
    phase: str
    max_grid: int | None
    features: frozenset[str]
    params: Mapping[str, int | bool | str] = field(hash=False)
    measured: bool
    provenance: str
    requires_package: str | None = None


def parse_table(file: Path, family: str, stem: str) -> tuple[KernelPath, ...]:
    """The rows of ``file``, which must be the table of ``family`` for ``stem``, in file order.

    Raises:
        ValueError: it is not TOML, has an unknown key or a value of the wrong type, belongs to
            another family or architecture, or a phase's rows do not cover every grid in ascending
            order.
    """
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid TOML: {error}") from None
    if unknown := document.keys() - {"table", "path"}:
        raise ValueError(f"{file}: unknown key {_names(unknown)}")
    _check_header(file, document.get("table"), family, stem)
    entries = document.get("path", [])
    if not isinstance(entries, list):
        raise ValueError(f"{file}: path must be an array of tables ([[path]])")
    rows = tuple(
        _parse_row(f"{file}: path {number}", entry, family)
        for number, entry in enumerate(entries, start=1)
    )
    for phase in PHASES[family]:
        _check_cover(file, phase, [(n, row) for n, row in enumerate(rows, 1) if row.phase == phase])
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


def _parse_row(where: str, entry: object, family: str) -> KernelPath:
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
    if entry["phase"] not in PHASES[family]:
        known = ", ".join(PHASES[family])
        raise ValueError(f"{where}: phase must be one of {known}, got {entry['phase']!r}")
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
    params = entry.get("params", {})
    for key, value in params.items():
        if not isinstance(value, int | str):
            raise ValueError(f"{where}: params.{key} must be int, bool or str, got {value!r}")
    return KernelPath(
        name=entry["name"],
        phase=entry["phase"],
        max_grid=entry.get("max_grid"),
        features=frozenset(entry["features"]),
        params=MappingProxyType(params),
        measured=entry["measured"],
        provenance=_provenance(where, entry),
        requires_package=entry.get("requires_package"),
    )


def _provenance(where: str, entry: Mapping[str, Any]) -> str:
    if not entry["measured"]:
        return f"not measured, {entry['source']}"
    if missing := {"gpu", "date"} - entry.keys():
        raise ValueError(f"{where}: measured = true needs {_names(missing)}")
    return f"{entry['gpu']}, {entry['date']}, {entry['source']}"


def _check_cover(file: Path, phase: str, rows: list[tuple[int, KernelPath]]) -> None:
    if not rows or rows[-1][1].max_grid is not None:
        where = f" {rows[-1][0]}" if rows else ""
        raise ValueError(f"{file}: path{where}: the last {phase} row must have no max_grid")
    previous: int | None = 0
    for number, row in rows:
        bound = row.max_grid
        if bound is not None and previous is None:
            raise ValueError(f"{file}: path {number}: a {phase} row without max_grid precedes it")
        if bound is not None and previous is not None and bound < previous:
            raise ValueError(
                f"{file}: path {number}: max_grid must not decrease, got {bound} after {previous}"
            )
        previous = bound


def _names(keys: set[str]) -> str:
    return ", ".join(sorted(keys))
