"""Write docs/support-matrix.md from the path tables, the compile reports and the result files.

    python docs/support_matrix.py

A test fails where the file is not what this writes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_cli.serve import SERVERS
from backend_core.engines import ENGINES
from backend_core.tables.select import PHASES, PathTable, load_table
from backend_core.target import KNOWN_TARGETS, Target

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support-matrix.md"
RESULTS = ROOT / "benchmarks" / "results"
FAMILIES = ("kda", "dsv4")

HEAD = """# Support matrix

Written by `docs/support_matrix.py` from `configs/`, the compile reports under `tests/` and the
files under `benchmarks/results/`; CI fails where it is stale.

## Hardware

- *checked*: `kda-dsv4 check` ran on that part; right calls of all calls, with the file.
- *compiled*: the table's Triton kernels were built offline for that architecture.
- *interpreted*: CI runs the Triton kernels in Triton's interpreter, the compressor's with the
  H200's parameters.

"""

_DRAWN = "the kernel of the layers; tested with drawn inputs only"
MODELS = f"""
## Models

| model | vllm | sglang |
|---|---|---|
| Kimi-Linear | KDA layers, prefill and decode | the same |
| Kimi-K3 | stock, and said (1) | {_DRAWN} |
| GLM-5.3-Flash, Ling-V3 | the flag is refused (2) | {_DRAWN} |
| DeepSeek-V4 | compressor ([dsv4.md](dsv4.md)) | the same, from 0.5.17 on (plans v2) |

1. Its layer is a class of its own (`KimiK3DeltaAttention`), whose forward also exports prefill
   checkpoints and verifies drafts by recomputing states: there is no seam around the kernels alone.
2. Likewise classes of their own (`Glm5NextLinearAttention`, `BailingMoeV3KimiDeltaAttention`).

Speculative decoding: in vLLM 0.30 and newer drafts are verified by this backend (tested on the CPU
alone), before that the KDA layers stay stock, and it is said; in sglang drafts are verified by its
own kernel."""


def render() -> str:
    """The page's text."""
    return (
        HEAD
        + "\n".join([*_hardware(), *_paths(), *_engines(), *MODELS.splitlines(), *_results()])
        + "\n"
    )


def _table(family: str, target: Target) -> PathTable | None:
    try:
        return load_table(family, target, directory=ROOT / "configs")
    except LookupError:
        return None


def _hardware() -> list[str]:
    columns = [(family, phase) for family in FAMILIES for phase in PHASES[family]]
    lines = [
        "| part | " + " | ".join(f"{family} {phase}" for family, phase in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for target in KNOWN_TARGETS.values():
        name = target.name if target.vendor == "cpu" else f"{target.name} ({target.arch})"
        cells = [_status(family, phase, target) for family, phase in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _status(family: str, phase: str, target: Target) -> str:
    if _table(family, target) is None:
        return "no table: stock code"
    for file, report in _reports("check_*.json"):
        machine = report["info"]["machine"]
        if report["interpreted"] or target.name not in machine["name"]:
            continue
        rows = [r for r in report["results"] if (r["family"], r["phase"]) == (family, phase)]
        made = [r for r in rows if r["status"] != "skipped"]
        right = sum(r["status"] == "ok" for r in made)
        return f"checked, {right} of {len(made)} ([{report['date']}]({_link(file)}))"
    if target.vendor == "cpu":
        return "torch, run in CI"
    compiled = json.loads((ROOT / "tests" / family / "compile_report.json").read_text())
    return "compiled, interpreted" if target.arch in compiled else "interpreted"


def _paths() -> list[str]:
    lines = [
        "",
        "## Paths",
        "",
        "In order of preference; `kda-dsv4 info --target all` prints each row and its parameters.",
        "",
        "| part | family | phase | paths | rows with measured parameters |",
        "|---|---|---|---|---|",
    ]
    for target in KNOWN_TARGETS.values():
        for family in FAMILIES:
            table = _table(family, target)
            for phase in PHASES[family] if table is not None else ():
                rows = [row for row in table.rows if row.phase == phase]
                names = ", ".join(dict.fromkeys(f"`{row.name}`" for row in rows))
                measured = sum(row.measured for row in rows)
                shown = f"{measured} of {len(rows)}" if target.vendor != "cpu" else "no parameters"
                lines.append(f"| {target.name} | {family} | {phase} | {names} | {shown} |")
    return lines


def _engines() -> list[str]:
    lines = [
        "",
        "## Engines",
        "",
        "| engine | releases | KDA adapter | DeepSeek-V4 adapter | result files |",
        "|---|---|---|---|---|",
    ]
    for engine in ENGINES.values():
        adapters = ["yes" if has_adapter(family, engine.name) else "no" for family in FAMILIES]
        files = [f"[{file.name}]({_link(file)})" for file in _files_of(engine.name)]
        shown = ", ".join(files)
        if not files:
            shown = "none: not run on a GPU" if engine.name in SERVERS else "CI, on a CPU"
        lines.append(f"| {engine.name} | {engine.supported} | {' | '.join(adapters)} | {shown} |")
    return lines


def has_adapter(family: str, engine: str) -> bool:
    """Whether there is an adapter of the family's operators for the engine."""
    return importlib.util.find_spec(f"{family}_backend.engines.{engine}") is not None


def _files_of(engine: str) -> list[Path]:
    return sorted(RESULTS.glob(f"*{engine}*.json"))


def _results() -> list[str]:
    lines = [
        "",
        "## Result files",
        "",
        "| file | GPU | date | torch, Triton |",
        "|---|---|---|---|",
    ]
    for file, report in _reports("*.json"):
        report = {**report.get("environment", {}), **report}
        info = report.get("info", {})
        gpu = report.get("gpu") or info.get("machine", {}).get("name") or "-"
        versions = [
            str(report.get(name) or info.get("packages", {}).get(name) or "-")
            for name in ("torch", "triton")
        ]
        date = report.get("date") or "-"
        lines.append(f"| [{file.name}]({_link(file)}) | {gpu} | {date} | {', '.join(versions)} |")
    return lines


def _reports(pattern: str) -> list[tuple[Path, dict[str, Any]]]:
    reports = [(file, json.loads(file.read_text())) for file in sorted(RESULTS.glob(pattern))]
    return [(file, report) for file, report in reports if isinstance(report, dict)]


def _link(file: Path) -> str:
    return f"../{file.relative_to(ROOT).as_posix()}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
