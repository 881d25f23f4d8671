"""``kda-dsv4 seams``: what the adapters rely on in an engine, and whether it is there."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from backend_cli.errors import BadInputError
from backend_core.engines import ENGINES
from backend_core.engines.seams import Finding, Part, hold, parts_of
from backend_core.engines.sources import Read, Sources, installed, of_wheel

_STATES = ("hold", "changed", "differ")
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
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print each name that is relied on.")
    ] = False,
) -> None:
    """Show whether what the adapters rely on is in the installed engines, or in a wheel.

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
        width = max(len(part.name) for part in found)
        for part, findings in found.items():
            failed |= any(finding.differs for finding in findings)
            _print(part, findings, width, failing=failing, verbose=verbose)
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
    tested = "tested" if ENGINES[engine].is_tested(version) else "not tested"
    every = [finding for findings in found.values() for finding in findings]
    return f"{engine} {version}, {tested}: {_counts(every, _STATES)}"


def _state(finding: Finding) -> str:
    if finding.differs is not None:
        return "differ"
    return "changed" if finding.changed else "hold"


def _counts(findings: list[Finding], states: Iterable[str]) -> str:
    number = Counter(map(_state, findings))
    return ", ".join(f"{number[state]} {state}" for state in states)


def _print(
    part: Part, findings: list[Finding], width: int, *, failing: bool, verbose: bool
) -> None:
    """A line for the part, and one for each of its seams that is not as expected."""
    states = {_state(finding) for finding in findings}
    if failing and states == {"hold"}:
        return
    verdict = "not served" if "differ" in states else "served"
    found = _counts(findings, [state for state in _STATES if state in states])
    print(f"  {part.name:{width}}  {verdict:10}  {found}")
    for finding in findings:
        state = _state(finding)
        if state != "hold" or (verbose and not failing):
            print(f"    {state:8}{finding.differs or finding.seam.place}")
