"""``kda-dsv4 seams``: what the adapters rely on in an engine, and whether it is there."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from backend_cli.errors import BadInputError
from backend_core.engines import ENGINES
from backend_core.engines.seams import Finding, Part, hold, parts_of
from backend_core.engines.sources import Read, Sources, installed, of_wheel

ENGINES_WITH_SEAMS = tuple(name for name in ENGINES if any(parts_of(name)))


def seams(
    wheel: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A wheel of an engine to read instead of what is installed."
        ),
    ] = None,
    failing: Annotated[
        bool, typer.Option("--failing", help="Print only what is not as expected.")
    ] = False,
) -> None:
    """Show what the adapters rely on in the installed engines, or in a wheel, and whether it holds.

    Ends with 1 where something does not hold.
    """
    releases = _installed() if wheel is None else [_of_wheel(wheel)]
    if not releases:
        print(f"no engine is installed ({', '.join(ENGINES_WITH_SEAMS)})")
    failed = False
    for engine, version, read in releases:
        sources = Sources(read)
        found = {part: hold(part, sources) for part in parts_of(engine)}
        print(_title(engine, version, found))
        for part, findings in found.items():
            failed |= any(finding.differs for finding in findings)
            _print(part, findings, failing)
    raise typer.Exit(int(failed))


def _installed() -> list[tuple[str, str, Read]]:
    found = ((name, ENGINES[name].installed()) for name in ENGINES_WITH_SEAMS)
    return [(name, version, installed(name)) for name, version in found if version is not None]


def _of_wheel(file: Path) -> tuple[str, str, Read]:
    match = re.match(r"(\w+)-([^-]+)-", file.name)
    if match is None or match[1] not in ENGINES_WITH_SEAMS:
        known = " or ".join(ENGINES_WITH_SEAMS)
        raise BadInputError(
            f"--wheel must be the file of a wheel of {known}, as vllm-0.33.0-….whl, got {file}"
        )
    try:
        return match[1], match[2], of_wheel(file)
    except (OSError, zipfile.BadZipFile) as error:
        raise BadInputError(f"--wheel cannot be read: {error}") from error


def _title(engine: str, version: str, found: dict[Part, list[Finding]]) -> str:
    states = Counter(_state(finding) for findings in found.values() for finding in findings)
    tested = "tested" if ENGINES[engine].is_tested(version) else "not tested"
    counts = ", ".join(f"{states[name]} {name}" for name in ("hold", "changed", "differ"))
    return f"{engine} {version}, {tested}: {counts}"


def _state(finding: Finding) -> str:
    if finding.differs is not None:
        return "differ"
    return "changed" if finding.changed else "hold"


def _print(part: Part, findings: list[Finding], failing: bool) -> None:
    states = {_state(finding) for finding in findings}
    if failing and states == {"hold"}:
        return
    verdict = "not served" if "differ" in states else "served"
    print(f"  {part.name}: {verdict}")
    for finding in findings:
        state = _state(finding)
        if not failing or state != "hold":
            print(f"    {state:8}{finding.differs or finding.seam.place}")
