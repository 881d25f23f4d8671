"""Where an engine's call spends its time: kernels on the GPU, how busy it is, Python functions."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.serve_work import say

OURS = ("kda_backend", "mla_backend", "dsv4_backend", "backend_core")
KERNELS, FUNCTIONS, GAPS, NAME = 12, 10, 4, 80
"""The most that a result lists of each, the longest first, and characters of a kernel's name."""
_ROOTS = ("vllm", "sglang", "torch", "triton", *OURS)


def shown(what: str, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print a call's profile on each rank; returns them with the call's name and the rank."""
    for rank, profile in enumerate(ranks):
        say(
            f"  {what}, rank {rank}: GPU {profile['gpu_ms']:.1f} ms in {profile['launches']}"
            f" launches, busy {profile['busy']:.0%} of {profile['span_ms']:.1f} ms"
        )
    top = list(ranks[0]["kernels"].items())[:10]
    say("    " + "; ".join(f"{name[:44]} {ms:.2f} in {n}" for name, (ms, n) in top))
    return [{"what": what, "rank": rank, **profile} for rank, profile in enumerate(ranks)]


def kernels_of(call: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Kernel name -> (ms, launches) of a call."""
    found: dict[str, tuple[float, int]] = {}
    for name, start, end in spans_of(call):
        ms, count = found.get(name, (0.0, 0))
        found[name] = (ms + (end - start) / 1e3, count + 1)
    return found


Span = tuple[str, float, float]
"""A kernel or a copy: its name, start and end, in µs."""


class Trace:
    """What this process runs on its GPU from now on, by CUPTI."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.record = profile(activities=[ProfilerActivity.CUDA])
        self.record.start()

    def spans(self) -> list[Span]:
        """The kernels and copies; the trace ends."""
        import torch

        torch.cuda.synchronize()
        self.record.stop()
        return [
            (event.name, event.time_range.start, event.time_range.end)
            for event in self.record.events()
            if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        ]


def spans_of(call: Callable[[], Any]) -> list[Span]:
    """A call's kernels and copies."""
    trace = Trace()
    call()
    return trace.spans()


def summary(spans: list[Span]) -> dict[str, Any]:
    """Of the kernels and copies of a call, how busy the GPU is.

    ``gpu_ms`` is their sum, ``span_ms`` from the first one's start to the last one's end, and
    ``busy`` the share of the span in which at least one runs: what is missing to 1 the GPU waits.
    ``kernels`` has the `KERNELS` with the most time as name -> [ms, launches].
    """
    if not spans:
        raise ValueError("the profiler saw no kernel: expected at least one, got none")
    by_kernel: dict[str, list[float]] = {}
    for name, start, end in spans:
        at = by_kernel.setdefault(name, [0.0, 0])
        at[0] += (end - start) / 1e3
        at[1] += 1
    covered, gaps = 0.0, []
    until = min(start for _, start, _ in spans)
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        if start > until:
            gaps.append((start - until) / 1e3)
        covered += max(0.0, end - max(start, until)) / 1e3
        until = max(until, end)
    span_ms = (until - min(start for _, start, _ in spans)) / 1e3
    return {
        "gpu_ms": sum(ms for ms, _ in by_kernel.values()),
        "span_ms": span_ms,
        "busy": covered / span_ms if span_ms else 1.0,
        "launches": len(spans),
        "longest_gaps_ms": sorted(gaps, reverse=True)[:GAPS],
        "kernels": longest(by_kernel),
    }


def longest(kernels: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """The kernels with the most time, as many as a result lists, by the head of their names; name
    -> (ms, launches)."""
    by_name: dict[str, list[float]] = {}
    for name, (ms, launches) in kernels.items():
        at = by_name.setdefault(name[:NAME], [0.0, 0])
        at[0] += ms
        at[1] += launches
    return dict(sorted(by_name.items(), key=lambda item: -item[1][0])[:KERNELS])


def functions_of(profile: cProfile.Profile, calls: int) -> dict[str, Any]:
    """Python functions of ``calls`` calls by their own time; the profiler's time is part of it."""
    rows = []
    entries: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, count, own, total, _) in entries.items():
        rows.append(
            {
                "function": f"{module_of(file)}:{name}",
                "calls": count / calls,
                "own_ms": 1e3 * own / calls,
                "ms": 1e3 * total / calls,
            }
        )
    rows.sort(key=lambda row: -float(row["own_ms"]))
    return {
        "all_ms": sum(float(row["own_ms"]) for row in rows),
        "ours_ms": sum(float(r["own_ms"]) for r in rows if str(r["function"]).startswith(OURS)),
        "functions": rows[:FUNCTIONS],
    }


def module_of(file: str) -> str:
    """A source file as a dotted name from its package on."""
    parts = list(Path(file).with_suffix("").parts)
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    roots = [i for i, part in enumerate(parts) if part in _ROOTS]
    return ".".join(parts[roots[0] :] if roots else parts[-1:])
