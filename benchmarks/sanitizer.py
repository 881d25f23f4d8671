"""compute-sanitizer over a small call of every kernel that this machine's tables can choose.

    python benchmarks/sanitizer.py --output benchmarks/results/sanitizer_h200.json

The calls are those of ``kda-dsv4 check``: each is compared with float64 as well. First all of them
run plainly, so that kernels are compiled and kept; then under memcheck, racecheck, initcheck and
synccheck, shared among processes, with PyTorch's caching allocator off, so that every tensor is an
allocation of its own. A report is counted for the kernel that it names, in each family that has one
of that name; what it says of torch's own kernels is counted for none of ours. A failure is a report
that ``sanitizer_explained.toml`` does not have, and a kernel of ours that no call launched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_cli.check.probes import Probe, probes
from backend_core.launch.cuda import CudaKernel
from backend_core.target import detect_target
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment
from benchmarks.sanitizer_explained import Listing, is_explained, listing_of

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SLOWEST = "racecheck"  # by far: its calls are shared among as many processes as there may be
Kernel = tuple[str, str]
"""(family, name)."""
_OPTIONS = ("--print-limit", "1000", "--show-backtrace", "no")
_OUTPUT = 1500  # characters that are kept of a process that did not end
_HOW_OFTEN = re.compile(r" \[\d+ hazards\]|\n +by thread .*")  # what differs from run to run
_DEFINED = (
    re.compile(r"^def (\w+_kernel)\(", re.MULTILINE),
    re.compile(r'^extern "C" __global__[^;{]*?\b(\w+)\(\s*const [^()]*Params', re.MULTILINE),
)


def todo() -> list[tuple[Probe, tuple[bool, int] | None]]:
    """The calls, the same list in every process: (probe, forced schedule of the Hopper prefill).

    Of each path all calls with its first row's parameters, and the last one with each other row's.
    """
    found: list[tuple[Probe, tuple[bool, int] | None]] = []
    of_path: dict[tuple[str, str, str], list[Probe]] = {}
    for probe in probes(detect_target(), interpreted=False):
        if probe.run is not None:
            of_path.setdefault((probe.family, probe.row.operator, probe.row.name), []).append(probe)
    for (_, _, name), all_of in of_path.items():
        rows: dict[str, list[Probe]] = {}
        for probe in all_of:
            rows.setdefault(f"{probe.grids} {probe.row.params}", []).append(probe)
        for number, of_row in enumerate(rows.values()):
            if name == "two_stage_sm90":
                schedules = [(split, ctas) for split in (False, True) for ctas in (2, 4)]
                found += [(of_row[0], schedule) for schedule in schedules]
                found += [(probe, None) for probe in of_row[1:]]
            else:
                found += [(probe, None) for probe in (of_row[-1:] if number else of_row)]
    return found


def run_calls(numbers: list[int], images: Path) -> None:
    """Runs the calls of these numbers and prints, as the last line, what was launched by each; the
    compiled CUDA C++ kernels are left in a folder."""
    calls, target, device = todo(), detect_target(), torch.device("cuda")
    launched = _record_launches(images)
    said: list[dict[str, Any]] = []
    for number in numbers:
        probe, schedule = calls[number]
        assert probe.run is not None
        if probe.row.name == "two_stage_sm90":
            _force(schedule)
        launched.clear()
        try:
            error, allowed = probe.run(target, device)
            torch.cuda.synchronize()
            wrong = None if error <= allowed else f"error {error:.2e}, allowed {allowed:.1e}"
        except Exception as exception:  # reported with the rest
            wrong = " ".join(f"{type(exception).__name__}: {exception}".split())[:500]
        name = f"{probe.family} {probe.row.operator} {probe.row.name} {probe.case}"
        said.append({"call": name, "family": probe.family, "kernels": sorted(launched)})
        said[-1]["wrong"] = wrong
    print("LAUNCHED " + json.dumps(said), flush=True)


def _record_launches(images: Path) -> set[str]:
    """The names of the kernels launched from now on, Triton's by its own hook; the others' images
    go into a folder."""
    from triton import knobs

    names: set[str] = set()
    plain = CudaKernel.__call__

    def call(self: CudaKernel, grid: int, *args: Any, **kwargs: Any) -> None:
        if grid:
            names.add(self._name)
        plain(self, grid, *args, **kwargs)
        if grid:
            digest = hashlib.sha256(self.image).hexdigest()[:16]
            (images / f"{self._name}-{digest}.cubin").write_bytes(self.image)

    def entered(metadata: Any) -> None:
        names.add(metadata.get()["name"])

    CudaKernel.__call__ = call  # type: ignore[method-assign]
    hook = knobs.runtime.launch_enter_hook
    if hasattr(hook, "add"):
        hook.add(entered)
    else:
        knobs.runtime.launch_enter_hook = entered
    return names


def _force(schedule: tuple[bool, int] | None) -> None:
    """The quickest schedule of the Hopper prefill; of those with this scan (split or not) and so
    many CTAs per SM, where ``schedule`` says so."""
    from kda_backend.prefill import two_stage_sm90 as pipeline
    from kda_backend.prefill.sm_schedule import schedules
    from kda_backend.selection import select

    def choose(model: Any, shape: Any) -> Any:
        return min(
            item
            for item in schedules(model, shape)
            if schedule in (None, (item[1].split, item[1].intra_ctas_per_sm))
        )[1]

    mock.patch.object(pipeline, "choose_schedule", choose).start()
    select.cache_clear()


def sanitised(
    tool: str | None, numbers: list[int], limit: float, images: Path
) -> tuple[str, str, float]:
    """(the process's own output, the tool's log, seconds) of one process."""
    command = [sys.executable, __file__, "--calls", ",".join(map(str, numbers))]
    command += ["--images", str(images)]
    if tool is not None:
        command = ["compute-sanitizer", "--tool", tool, *_OPTIONS, *command]
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool's own child too, which holds the GPU
        text, _ = process.communicate()
        text += f"\nended after {limit:g} s\n"
    log = "\n".join(line for line in text.splitlines() if line.startswith("====="))
    own = "\n".join(line for line in text.splitlines() if not line.startswith("====="))
    return own, log, time.perf_counter() - begin


def launched_by(own: str) -> list[dict[str, Any]] | None:
    """The output of `run_calls`, or ``None`` if it did not end."""
    for line in own.splitlines():
        if line.startswith("LAUNCHED "):
            found: list[dict[str, Any]] = json.loads(line.removeprefix("LAUNCHED "))
            return found
    return None


def reports(log: str) -> list[str]:
    """The tool's reports. The first line of one stands one space behind the mark, its others
    further; a mark alone ends it."""
    headings = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY")
    found: list[list[str]] = [[]]
    for line in log.splitlines():
        text = line.removeprefix("=========").rstrip()
        if text.strip().startswith(headings):
            continue
        if not text.startswith("  "):
            found.append([])
        if text.strip():
            found[-1].append(text)
    return ["\n".join(block) for block in found if block]


def our_kernels() -> set[Kernel]:
    """All kernels in the source tree, of packages named after their families."""
    return {
        (file.relative_to(ROOT).parts[0].removesuffix("_backend"), name)
        for end in ("py", "cu")
        for file in ROOT.glob(f"*_backend/kernels/**/*.{end}")
        for shape in _DEFINED
        for name in shape.findall(file.read_text())
    }


def launched_in(said: list[dict[str, Any]]) -> set[Kernel]:
    """Every kernel that calls of its own family launched."""
    return {(call["family"], name) for call in said for name in call["kernels"]}


def rows_of(
    tool: str, said: list[dict[str, Any]], found: list[str], images: Path
) -> list[dict[str, Any]]:
    """A row for each kernel that was launched under the tool, with each of its reports once."""
    rows = []
    for family, kernel in sorted(launched_in(said)):

        def listings(kernel: str = kernel) -> list[Listing]:
            return [listing_of(file) for file in sorted(images.glob(f"{kernel}-*.cubin"))]

        pattern = re.compile(rf"\b{re.escape(kernel)}\b")
        own = [text for text in found if pattern.search(text)]
        times = Counter(_HOW_OFTEN.sub("", text) for text in own)
        told: list[dict[str, Any]] = [
            {
                "text": text,
                "times": count,
                "explained": is_explained(tool, kernel, text, listings),
            }
            for text, count in times.items()
        ]
        unexplained = sum(row["times"] for row in told if not row["explained"])
        rows.append(
            {
                "family": family,
                "kernel": kernel,
                "tool": tool,
                "errors": len(own),
                "unexplained": unexplained,
                "reports": sorted(told, key=lambda row: (row["explained"], row["text"])),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", help="run these calls in this process (numbers, by commas)")
    parser.add_argument("--images", type=Path, help="where they leave the compiled kernels")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=16, help="processes at once")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of one process")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.calls is not None:
        run_calls([int(number) for number in args.calls.split(",")], args.images)
        return
    calls = todo()
    with tempfile.TemporaryDirectory() as images:
        measure(calls, args, Path(images))


def measure(calls: list[Any], args: argparse.Namespace, images: Path) -> None:
    """All calls under all tools; ends the program with 1 unless everything is clean."""
    tools = args.tools.split(",")
    begin = time.perf_counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        # process i takes calls i, i + jobs, i + 2 jobs ...
        warm = [list(range(i, len(calls), args.jobs)) for i in range(min(args.jobs, len(calls)))]
        for own, _, _ in pool.map(lambda part: sanitised(None, part, args.limit, images), warm):
            if launched_by(own) is None:
                sys.exit(f"a call fails without a tool: {own[-2000:]}")
        print(f"compiled and run plainly: {time.perf_counter() - begin:.0f} s", flush=True)
        jobs: list[tuple[str, list[int]]] = []
        for tool in sorted(tools, key=SLOWEST.__ne__):
            parts = max(1, args.jobs if tool == SLOWEST else args.jobs // len(tools))
            jobs += [(tool, list(range(i, len(calls), parts))) for i in range(parts)]

        def sanitise(job: tuple[str, list[int]]) -> tuple[str, str, float]:
            return sanitised(*job, args.limit, images)

        done = list(pool.map(sanitise, jobs))
    result: dict[str, Any] = dict(environment())
    result |= {"rows": [], "not_run": [], "unfinished": [], "other_kernels": {}}
    ours, seen = our_kernels(), set[Kernel]()
    for tool in tools:
        said: list[dict[str, Any]] = []
        found: list[str] = []
        for (its_tool, numbers), (own, log, seconds) in zip(jobs, done, strict=True):
            if its_tool != tool:
                continue
            print(f"{tool}: {len(numbers)} calls in {seconds:.0f} s", flush=True)
            launched = launched_by(own)
            if launched is None:
                result["unfinished"].append(
                    {"tool": tool, "calls": numbers, "output": (own + log)[-_OUTPUT:]}
                )
            said += launched or []
            found += reports(log)
        result["rows"] += rows_of(tool, said, found, images)
        seen |= launched_in(said)
        known = re.compile("|".join(rf"\b{name}\b" for _, name in sorted(ours | seen)))
        others = [text for text in found if not known.search(text)]
        result["other_kernels"][tool] = {"reports": len(others), "first": others[:1]}
        result["unfinished"] += [
            {"tool": tool, "calls": [call["call"]], "output": call["wrong"]}
            for call in said
            if call["wrong"]
        ]
    result["not_run"] = [f"{family} {name}" for family, name in sorted(ours - seen)]
    result["seconds"] = round(time.perf_counter() - begin, 1)
    if args.output:
        write_record(args.output, result)
    show(result)
    wanting = result["unfinished"] or result["not_run"]
    if wanting or any(row["unexplained"] for row in result["rows"]):
        sys.exit(1)


def show(result: dict[str, Any]) -> None:
    """What wants an explanation or did not run."""
    for row in result["rows"]:
        for report in row["reports"]:
            if not report["explained"]:
                print(f"not explained, {row['tool']}, {report['times']} times:{report['text']}")
    for item in result["unfinished"]:
        print(f"not finished or wrong under {item['tool']}: {item['calls']}: {item['output']}")
    for tool, others in result["other_kernels"].items():
        print(f"{tool}: {others['reports']} reports of other kernels {others['first']}")
    print(f"not run: {', '.join(result['not_run'])}")
    print(f"{result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
