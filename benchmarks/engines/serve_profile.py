"""Where an engine's call spends its time: kernels on the GPU, and how busy it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engines.serve_work import say

KERNELS, NAME = 12, 80
"""The most that a result lists, the longest first, and characters of a kernel's name."""


def shown(what: str, ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print a call's profile on each rank; returns them with the call's name and the rank."""
    for rank, profile in enumerate(ranks):
        say(
            f"  {what}, rank {rank}: GPU {profile['gpu_ms']:.1f} ms in {profile['launches']}"
            f" launches, busy {profile['busy']:.0%} of {profile['span_ms']:.1f} ms"
        )
    top = list(ranks[0]["kernels"].items())[:10]
    say("    " + "; ".join(f"{name[:44]} {ms:.2f} in {n:g}" for name, (ms, n) in top))
    return [{"what": what, "rank": rank, **profile} for rank, profile in enumerate(ranks)]


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


def last(spans: list[Span], ms: float, left_ms: float = 0.0) -> list[Span]:
    """Those that begin in the last ``ms`` before the end, or before ``left_ms`` of it are left."""
    end = max((end for _, _, end in spans), default=0.0) - 1e3 * left_ms
    return [span for span in spans if end - 1e3 * ms <= span[1] <= end]


def summary(spans: list[Span], steps: int = 1) -> dict[str, Any]:
    """Of the kernels and copies of a call, how busy the GPU is.

    ``gpu_ms`` is their sum, ``span_ms`` from the first one's start to the last one's end, and
    ``busy`` the share of the span in which at least one runs: what is missing to 1 the GPU waits.
    ``kernels`` has the `KERNELS` with the most time as name -> [ms, launches]. Of a call of several
    ``steps`` all of these are of one, on average.
    """
    if not spans:
        raise ValueError("the profiler saw no kernel: expected at least one, got none")
    by_kernel: dict[str, list[float]] = {}
    for name, start, end in spans:
        at = by_kernel.setdefault(name, [0.0, 0])
        at[0] += (end - start) / 1e3 / steps
        at[1] += 1 / steps
    covered = 0.0
    until = min(start for _, start, _ in spans)
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        covered += max(0.0, end - max(start, until)) / 1e3 / steps
        until = max(until, end)
    span_ms = (until - min(start for _, start, _ in spans)) / 1e3 / steps
    return {
        "gpu_ms": sum(ms for ms, _ in by_kernel.values()),
        "span_ms": span_ms,
        "busy": covered / span_ms if span_ms else 1.0,
        "launches": round(len(spans) / steps),
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
