"""What the lists of seams find in the installed release of an engine, for the tests of each."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from backend_core.engines.seams import Part, Seam, _bodies, hold, parts_of
from backend_core.engines.sources import Sources, installed
from tests.cli.program import run
from tests.engines.bodies import hashes


def differing(engine: str) -> set[str]:
    """The names of parts that cannot be served."""
    sources = Sources(installed(engine))
    return {part.name for part in parts_of(engine) if any(x.differs for x in hold(part, sources))}


def recorded(engine: str, version: str) -> dict[str, str]:
    """The hashes of bodies that are kept for a release."""
    return {place: of[version] for place, of in _bodies()[engine].items() if version in of}


def found(engine: str) -> dict[str, str]:
    """Those of the installed release."""
    return hashes(engine, Sources(installed(engine)))


def of_the_release_before(
    engine: str, version: str, then: Iterable[Seam] = ()
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By part what the installed release changes and where it differs, for a package that knows one
    release alone.

    Args:
        version: that release.
        then: its seams that were others, in the place of those of the same place and kind.
    """
    sources = Sources(installed(engine))
    known = {place: {version: digest} for place, digest in recorded(engine, version).items()}
    changed: dict[str, list[str]] = {}
    differs: dict[str, list[str]] = {}
    for part in parts_of(engine):
        for finding in hold(_as_then(part, then), sources, known):
            if finding.differs:
                differs.setdefault(part.name, []).append(finding.differs)
            if finding.changed:
                name = finding.seam.place.partition(":")[2]
                changed.setdefault(part.name, []).append(name)
    return changed, differs


def _as_then(part: Part, then: Iterable[Seam]) -> Part:
    old = {seam.place: seam for seam in then}
    return replace(part, seams=tuple(old.get(seam.place, seam) for seam in part.seams))


def seams_of_wheel(engine: str, version: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of ``kda-dsv4 seams`` on the installed files as a wheel of a version."""
    wheel = folder / f"{engine}-{version}-cp38-abi3-manylinux_2_31_x86_64.whl"
    read = installed(engine)
    with zipfile.ZipFile(wheel, "w") as archive:

        def kept(name: str) -> str | None:
            text = read(name)
            if text is not None:
                archive.writestr(name, text)
            return text

        sources = Sources(kept)
        for part in parts_of(engine):
            hold(part, sources)
    code, out, _ = run("seams", "--failing", "--wheel", str(wheel))
    return code, out


def imported_by_holding(engine: str) -> set[str]:
    """The modules of an engine that a process has imported after it held all parts."""
    code = (
        "import sys\n"
        "from backend_core.engines import seams\n"
        f"parts = list(seams.parts_of({engine!r}))\n"
        "[seams.refusal(part) for part in parts]\n"
        f"print(*(x for x in sys.modules if x.split('.')[0] in ({engine!r}, 'torch')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
