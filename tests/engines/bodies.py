"""Write backend_core/engines/bodies.toml from the sources of the releases of the contract tests.

    python tests/engines/bodies.py

Read what changed between two releases before committing: a changed body may have a new feature that
the function in its place must have too, or must refuse.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backend_core.engines import ENGINES
from backend_core.engines.seams import BODIES, parts_of
from backend_core.engines.sources import Read, Sources, digest
from tests.engines.envs import environment, load_recipes

HEAD = "# written by tests/engines/bodies.py\n"


def reader(folder: Path) -> Read:
    """The files of a folder of packages."""
    return lambda file: (folder / file).read_text() if (folder / file).is_file() else None


def hashes(engine: str, sources: Sources) -> dict[str, str]:
    """By place the hash of each body that an adapter replaces or follows, where it is there."""
    places = {seam.place for part in parts_of(engine) for seam in part.seams if seam.body}
    found = {place: sources.function(*place.split(":")) for place in sorted(places)}
    return {place: digest(node) for place, node in found.items() if node is not None}


def render(releases: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """The file's text.

    Args:
        releases: by engine and version, what `hashes` finds.
    """
    lines = [HEAD]
    for engine in dict.fromkeys(engine for engine, _ in releases):
        lines.append(f"[{engine}]")
        of_engine = {
            version: found for (name, version), found in releases.items() if name == engine
        }
        for place in sorted({place for found in of_engine.values() for place in found}):
            each = [f'"{v}" = "{x[place]}"' for v, x in of_engine.items() if place in x]
            lines.append(f'"{place}" = {{ {", ".join(each)} }}')
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    recipes, releases = load_recipes(), {}
    for engine in ENGINES.values():
        for version in engine.tested:
            name = f"{engine.name}=={version}"
            if name in recipes:
                python = environment(name, recipes[name])
                (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
                found = hashes(engine.name, Sources(reader(packages)))
                releases[engine.name, version] = found
    BODIES.write_text(render(releases), encoding="utf-8")


if __name__ == "__main__":
    main()
