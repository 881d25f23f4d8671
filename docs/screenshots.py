"""Write the pictures of `info`, `check`, `serve` and `seams` in docs/img/, as on one H200.

    python docs/screenshots.py

The commands run with the machine and the calls of benchmarks/results/check_h200.json, the
configuration of Kimi-Linear-48B, and the newest tested releases of the engines, in which, as the
contract tests find, everything holds. A test fails where a picture is not what this writes.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from typer.testing import CliRunner

from backend_cli import info, seams, serve
from backend_cli.check import command as check
from backend_cli.main import app
from backend_core.engines import ENGINES, Engine
from backend_core.engines import seams as held
from backend_core.engines.seams import Finding, Part
from backend_core.target import Target
from docs.support_matrix import read_report
from docs.svg import box, picture, text

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "img"
KIMI_RANK = ROOT / "benchmarks" / "engines" / "configs" / "kimi_linear_rank_of_8" / "config.json"
MODEL = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
COMMANDS = {
    "info": ["info"],
    "check": ["check"],
    "serve": ["serve", "--engine", "vllm", MODEL, "-tp", "4"],
    "seams": ["seams"],
}
COLUMNS = 80


def render() -> dict[Path, str]:
    """Every picture, by file."""
    with h200():
        return {IMAGES / f"{name}.svg": _drawn(args) for name, args in COMMANDS.items()}


@contextmanager
def h200() -> Iterator[None]:
    """The machine and the engines that the commands find."""
    report = read_report(ROOT / "benchmarks" / "results" / "check_h200.json")
    machine = Target(**report["info"]["machine"])
    versions = report["info"]["packages"]

    def all_hold(part: Part, sources: object) -> list[Finding]:
        return [Finding(seam) for seam in part.seams]

    with ExitStack() as stack:
        stands_for: list[tuple[Any, str, Callable[..., Any]]] = [
            (info, "detect_target", lambda: machine),
            (info, "_version", versions.get),
            (platform, "python_version", lambda: report["info"]["python"]),
            (Engine, "installed", lambda engine: ENGINES[engine.name].tested[-1]),
            (held, "difference", lambda part: None),
            (check, "run", lambda *_: report),
            (serve, "detect_target", lambda: machine),
            (serve, "read_config", lambda model: _kimi()),
            (serve, "_program", lambda engine: engine),
            (os, "execvp", lambda *command: None),
            (seams, "installed", lambda engine: lambda name: None),
            (seams, "hold", all_hold),
        ]
        for owner, name, stand_in in stands_for:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def _kimi() -> dict[str, Any]:
    """Kimi-Linear-48B's configuration, of which the committed one is a rank of eight."""
    config = _read(KIMI_RANK)
    linear = config["linear_attn_config"]
    linear["num_heads"] *= 8
    return config | {"num_attention_heads": config["num_attention_heads"] * 8}


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def printed(args: list[str]) -> list[str]:
    """The lines that a command prints in a terminal of `COLUMNS` columns."""
    with tempfile.TemporaryDirectory() as nowhere:
        environment = {
            "COLUMNS": str(COLUMNS),
            "XDG_CONFIG_HOME": nowhere,
            "KDA_DSV4_CONFIG_DIR": None,
            "KDA_DSV4_STRICT": None,
        }
        done = CliRunner().invoke(app, args, prog_name="kda-dsv4", env=environment)
    if done.exit_code:
        raise RuntimeError(f"kda-dsv4 {' '.join(args)} ended with {done.exit_code}: {done.output}")
    lines = [f"$ kda-dsv4 {' '.join(args)}", *done.stdout.splitlines()]
    return [line[at : at + COLUMNS] for line in lines for at in range(0, len(line) or 1, COLUMNS)]


def _drawn(args: list[str]) -> str:
    command, *lines = printed(args)
    height = 18
    parts = [box(0.5, 0.5, COLUMNS * 7.85 + 31, height * (len(lines) + 1) + 23, "paper")]
    parts.append(text(16, 26, command, "mono bold"))
    for number, line in enumerate(lines, start=1):
        if line:
            parts.append(text(16, 26 + height * number, line, "mono"))
    width = round(COLUMNS * 7.85) + 32
    return picture(width, height * (len(lines) + 1) + 24, " ".join(["kda-dsv4", *args]), parts)


if __name__ == "__main__":
    for file, drawing in render().items():
        file.write_text(drawing, encoding="utf-8")
        print(file.relative_to(ROOT))
