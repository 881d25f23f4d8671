"""How the benchmarks measure: medians of CUDA-graph replays, and the Python call an engine pays.

Calls are timed without gradients, as engines make them.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def graph_time_ms(call: Callable[[], object], replays: int = 30, calls: int | None = None) -> float:
    """GPU time of one call, in ms: median over replays of a CUDA graph that holds several calls.

    Several calls in one graph hide the launch of the graph itself behind the first of them.
    """
    with _own_stream() as stream:
        for _ in range(3):
            call()
        if calls is None:
            start, end = _events()
            start.record()
            call()
            end.record()
            end.synchronize()
            calls = max(1, min(20, int(4.0 / max(start.elapsed_time(end), 1e-3))))
        return _replayed_ms([call] * calls, stream, replays)


def graph_us(calls: list[Callable[[], object]], replays: int) -> float:
    """GPU time per call, in us: the median over replays of a graph that holds every call once.

    For calls that differ, for instance in their inputs, so that none finds its own in the L2 cache.
    """
    with _own_stream() as stream:
        calls[0]()
        calls[-1]()
        stream.synchronize()
        return 1e3 * _replayed_ms(calls, stream, replays)


@contextlib.contextmanager
def _own_stream() -> Iterator[torch.cuda.Stream]:
    """A new stream in turns with the current one."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def _replayed_ms(
    calls: list[Callable[[], object]], stream: torch.cuda.Stream, replays: int
) -> float:
    """Time per call: the median over replays of one graph, after a first that does not count."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    start, end = _events()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return start, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def stream_time_ms(call: Callable[[], object], repeats: int = 5) -> float:
    """GPU time of one call, in ms: median between events on the default stream.

    For calls whose kernels go there whatever stream is current, which a graph cannot hold. The GPU
    is kept waiting meanwhile, so that the host's time to launch is not counted.
    """
    torch.cuda.synchronize()
    times: list[float] = []
    with torch.cuda.stream(torch.cuda.default_stream()):
        for _ in range(2):
            call()
        for _ in range(repeats):
            start, end = _events()
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # cycles
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.no_grad()
def call_time_ms(call: Callable[[], object], repeats: int = 50) -> float:
    """Time of one Python call with an idle GPU before and after it: host and device, in ms."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


@torch.no_grad()
def host_time_ms(call: Callable[[], object], repeats: int = 200) -> float:
    """Time the host spends in one Python call, in ms: the GPU is kept from filling its queue."""
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_bandwidth_gbs() -> float:
    """Bytes read plus bytes written by an elementwise kernel over 1 GiB, in GB/s.

    A kernel, since ``copy_`` becomes a memory copy of the driver's, which is slower.
    """
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    ms = graph_time_ms(lambda: torch.neg(source, out=target), calls=4)
    return 2 * source.nbytes / (ms * 1e6)


def environment() -> dict[str, str | None]:
    """The origin of a result: the script that writes it, GPU, versions, commit and date."""
    return {
        "script": f"benchmarks/{Path(sys.argv[0]).name}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
