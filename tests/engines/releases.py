"""What the lists of seams find in the installed release of an engine, for the tests of each."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from backend_core.engines.seams import _bodies, hold, parts_of
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
