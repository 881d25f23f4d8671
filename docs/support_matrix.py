"""Write docs/support-matrix.md from the path tables, the compile reports and the result files.

    python docs/support_matrix.py

A test fails where the file is not what this writes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_cli.serve import SERVERS
from backend_core.engines import ENGINES
from backend_core.family import PACKAGES, Family
from backend_core.tables.load import PathTable, load_table
from backend_core.tables.schema import Row
from backend_core.target import KNOWN_TARGETS, Target

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "support-matrix.md"
RESULTS = ROOT / "benchmarks" / "results"
TRITON = RESULTS / "triton_releases.json"
FAMILIES: dict[str, Family] = {
    package: importlib.import_module(f"{package}.family").FAMILY for package in PACKAGES
}

HEAD = """# Support matrix

This page is written by `docs/support_matrix.py` from `configs/`, the compile reports under `tests/`
and the files under `benchmarks/results/`; CI fails where it is out of date.

## Hardware

- *checked*: `kda-dsv4 check` ran on that GPU. The numbers are right calls of all calls, with a link
  to the result.
- *compiled*: the table's Triton kernels were built offline for that architecture.
- *interpreted*: CI runs the Triton kernels in Triton's interpreter.
- *upstream*: the family has no table for the GPU, so the engine's own code runs.

"""


def _link(file: Path) -> str:
    return f"../{file.relative_to(ROOT).as_posix()}"


def _result(what: str, name: str) -> str:
    return f"[{what}]({_link(RESULTS / name)})"


_SMALL = _result("small model", "dsv4_engines_h200.json")
MODELS = f"""
## Models

| model | vllm | sglang |
|---|---|---|
| Kimi-Linear | KDA, MLA decode; {_result("all layers", "vllm033_kimi48b.json")} | KDA, MLA \
decode; {_result("all layers", "sglang_kimi48b.json")} |
| Kimi-K3 | KDA; {_result("a few layers", "vllm033_kimi_k3_drafts.json")} | KDA; \
{_result("a few layers", "sglang_kimi_k3.json")} |
| GLM-5.3-Flash | KDA; {_result("small model", "vllm033_bounded_gate.json")} | KDA; \
{_result("a few layers", "sglang_glm_5_3_flash.json")} |
| Ling-V3 | KDA; {_result("a few layers", "vllm033_ling_3_tiny_drafts.json")} | KDA; \
{_result("a few layers", "sglang_ling_3_tiny.json")} |
| DeepSeek-V2, DeepSeek-V3, Kimi-K2 | MLA decode; CPU | MLA decode; CPU |
| DeepSeek-V4 | compressor, attention; {_SMALL} | compressor, attention (0.5.23); {_SMALL} |
| DeepSeek-V4.1 | the same in 0.33; {_SMALL} | the same in 0.5.23; {_SMALL} |

MLA decode and DeepSeek-V4's attention are served where they were measured to be faster
([MLA](families/mla.md)), in sglang MLA decode with `--page-size 64`. Each cell ends with what has
run with this package:

- *all layers*, *a few layers*: the model's configuration on an H200, with random weights
- *small model*: one of the same architecture on an H200, with random weights
- *CPU*: contract tests alone, with the releases' own wheels; the other cells have these too

Small trained checkpoints of Kimi-Linear's architecture
[answered questions](performance/servers.md#answers-of-a-small-model) in both engines. No result is
of published weights.

Speculative decoding of KDA layers: with vLLM this package verifies the drafts. With sglang it
verifies chains, among them one path of each tree of [n-gram drafts](engines/sglang.md#kimi-linear),
and sglang's own kernel verifies other trees. On an H200 both engines have run with n-gram drafts
([vLLM]({_link(RESULTS / "recall_vllm033_ngram.json")}),
[sglang]({_link(RESULTS / "recall_sglang_drafts.json")})) and with drafts of a model's own MTP layer
([times](performance/servers.md#layers-of-other-models-and-few-heads)).

Some of DeepSeek-V4's record formats exist only on AMD ([list](families/dsv4.md#on-amd)). They
follow the sources of the kernels that read them. They are interpreted, compiled, and executed as
machine code of gfx942 and gfx950 on a CPU. It has not been shown on a GPU that aiter's kernels read
them. `kda-dsv4 check` runs each of them."""


def render() -> str:
    """The page's text."""
    return (
        HEAD
        + "\n".join([*_hardware(), *_paths(), *_triton(), *_engines(), *MODELS.splitlines()])
        + "\n"
    )


def _table(family: Family, target: Target) -> PathTable | None:
    try:
        return load_table(family.tables, target, directory=ROOT / "configs")
    except LookupError:
        return None


def _hardware() -> list[str]:
    titles = [family.title for family in FAMILIES.values()]
    lines = ["| part | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    named = KNOWN_TARGETS.values()
    machines = (Target(**report["info"]["machine"]) for _, report in _reports("check_*.json"))
    others = [x for x in machines if not any(known.name in x.name for known in named)]
    for target in [*others, *named]:
        name = target.name if target.vendor == "cpu" else f"{target.name} ({target.arch})"
        cells = [_status(family, target) for family in FAMILIES.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _status(family: Family, target: Target) -> str:
    if _table(family, target) is None:
        return "upstream"
    for file, report in _reports("check_*.json"):
        machine = report["info"]["machine"]
        if report["interpreted"] or target.name not in machine["name"]:
            continue
        rows = [row for row in report["results"] if row["operator"] in family.tables.operator_names]
        made = [row for row in rows if row["status"] != "skipped"]
        if made:
            right = sum(row["status"] == "ok" for row in made)
            return f"checked, {right} of {len(made)} ([{report['date']}]({_link(file)}))"
    if target.vendor == "cpu":
        return "torch, run in CI"
    compiled = json.loads((ROOT / "tests" / family.name / "compile_report.json").read_text())
    return "compiled, interpreted" if target.arch in compiled else "interpreted"


def _paths() -> list[str]:
    lines = [
        "",
        "## Paths",
        "",
        "Paths stand in order of preference; `kda-dsv4 info --target all --verbose` prints each"
        " row.",
        "",
        "| part | family | operator | paths | rows with measured parameters | with Triton |",
        "|---|---|---|---|---|---|",
    ]
    parts: dict[tuple[str, ...], list[str]] = {}
    for target in KNOWN_TARGETS.values():
        if target.vendor == "cpu":
            continue
        for family in FAMILIES.values():
            table = _table(family, target)
            if table is None:
                continue
            for operator in family.tables.operator_names:
                rows = [row for row in table.rows if row.operator == operator]
                names = ", ".join(dict.fromkeys(f"`{row.name}`" for row in rows))
                measured = f"{sum(row.measured for row in rows)} of {len(rows)}"
                with_triton = ", ".join(_releases(rows)) or "-"
                cells = (family.name, f"`{operator}`", names, measured, with_triton)
                parts.setdefault(cells, []).append(target.name)
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in parts.items()]
    return [*lines, "", "On a CPU every operator has the path `torch`."]


def _releases(rows: list[Row]) -> list[str]:
    """The releases of Triton with which rows were measured, as their result files say."""
    files = {ROOT / row.provenance.rpartition(", ")[2] for row in rows if row.measured}
    return sorted({json.loads(file.read_text(encoding="utf-8"))["triton"] for file in files})


def _triton() -> list[str]:
    rows = json.loads(TRITON.read_text(encoding="utf-8"))["rows"]
    lines = [
        "",
        "## Triton",
        "",
        "torch brings Triton along, and an engine requires one release of torch. Each GPU result",
        "names its release, and CI's tests are of Triton 3.6.0 (torch 2.11). CI also compiles the",
        "kernels for Hopper with the newest engines' release and interprets a KDA decode with it.",
        f"Other releases ([result]({_link(TRITON)})), and runs of `check` on a GPU, do as follows:",
        "",
        "| Triton | torch | what | right |",
        "|---|---|---|---|",
    ]
    for row in rows:
        number = row.get("kernels", row.get("tests"))
        right = f"{number - len(row['failed']):,} of {number:,}"
        lines.append(f"| {row['triton']} | {row['torch']} | {row['what']} | {right} |")
    for file, report in _reports("check_*.json"):
        packages, machine = report["info"]["packages"], report["info"]["machine"]
        what = f"[`kda-dsv4 check`]({_link(file)}), {machine['name']}"
        right = f"{report['checked'] - report['failures']:,} of {report['checked']:,}"
        lines.append(f"| {packages['triton']} | {packages['torch']} | {what} | {right} |")
    return lines


def _engines() -> list[str]:
    columns = [f"{family.name} adapter" for family in FAMILIES.values()]
    lines = [
        "",
        "## Engines",
        "",
        f"| engine | tested releases | {' | '.join(columns)} | their result files |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for engine in ENGINES.values():
        adapters = [adapter_of(package, engine.name) for package in FAMILIES]
        files = [f"[{file.name}]({_link(file)})" for file in _files_of(engine.name)]
        shown = ", ".join(files)
        if not files:
            shown = "none: not run on a GPU" if engine.name in SERVERS else "run in CI, on a CPU"
        lines.append(
            f"| {engine.name} | {', '.join(engine.tested)} | {' | '.join(adapters)} | {shown} |"
        )
    return lines


def adapter_of(package: str, engine: str) -> str:
    """The cell of a family's adapter for an engine, or for its server of videos alone."""
    if importlib.util.find_spec(f"{package}.engines.{engine}") is not None:
        return "yes"
    if importlib.util.find_spec(f"{package}.engines.{engine}_diffusion") is not None:
        return f"[of its video server](engines/{engine}.md#its-video-server)"
    return "no"


def _files_of(engine: str) -> list[Path]:
    """The result files of the engine's tested releases that a page cites."""
    found = []
    for file in (file for file in cited() if engine in file.stem):
        version = json.loads(file.read_text(encoding="utf-8")).get("environment", {}).get(engine)
        if version is None or ENGINES[engine].is_tested(version):
            found.append(file)
    return found


def cited() -> list[Path]:
    """The result files that README or a page beside this one names."""
    pages = [ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if p != PAGE)]
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(pages))
    return [file for file in sorted(RESULTS.glob("*.json")) if file.name in text]


def _reports(pattern: str) -> list[tuple[Path, dict[str, Any]]]:
    reports = [(file, read_report(file)) for file in sorted(RESULTS.glob(pattern))]
    return [(file, report) for file, report in reports if isinstance(report, dict)]


def read_report(file: Path) -> Any:
    """The report of a run of ``kda-dsv4 check``, with operators by their names of today."""
    # Reports of before 2026-11-28 call the operator v41 low_ratio.
    return json.loads(file.read_text(encoding="utf-8").replace('"low_ratio"', '"v41"'))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
