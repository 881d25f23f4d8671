"""The sglang benchmark without sglang: an engine that answers at once, and a trace's kernels."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import serve_sglang
from benchmarks.engines import serve_work


class Engine:
    """Answers at once; a profile has two kernels of a call, and one a millisecond of a decode.

    Attributes:
        steps: of a scheduler that writes them for `SchedulerLog`.
    """

    decoded = False

    def __init__(self, folder: Path) -> None:
        self.steps = folder / "1"

    def generate(
        self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], **more: Any
    ) -> list[dict[str, Any]]:
        assert len(input_ids) == len(sampling_params)
        new = [one["max_new_tokens"] for one in sampling_params]
        self.decoded = max(new) > 1
        with self.steps.open("a") as file:
            for sequences in [0] + [len(new)] * (min(new) - 1) + [1] * 15:
                at = [time.perf_counter() for _ in range(16)][-1]
                file.write(f"{at} {sequences}\n")
        return [
            {
                "output_ids": [5] * one,
                "meta_info": {
                    "output_top_logprobs": [[(-1.0, 5, None), (-1.5, 9, None)]] * one,
                    "cached_tokens": 64,
                },
            }
            for one in new
        ]

    def flush_cache(self) -> SimpleNamespace:
        return SimpleNamespace(success=True)

    def start_profile(self, output_dir: str, activities: list[str]) -> None:
        self.place = Path(output_dir)

    def stop_profile(self) -> None:
        events = [
            {"name": "gemm", "cat": "kernel", "ts": 10, "dur": 5},
            {"name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 50},
            {"name": "Memcpy", "cat": "gpu_memcpy", "ts": 20, "dur": 5},
        ]
        if self.decoded:
            step = {"name": "step", "cat": "kernel", "dur": 500}
            events = [{**step, "ts": 1000 * at} for at in range(10)]
        text = json.dumps({"traceEvents": events}).encode()
        (self.place / "1").mkdir()
        (self.place / "1" / "TP-0.trace.json.gz").write_bytes(gzip.compress(text))


@pytest.fixture(autouse=True)
def decodes_are_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_work, "DECODE_S", 0.0)


@pytest.fixture
def asked(tmp_path: Path) -> serve_sglang.Asked:
    (folder := tmp_path / "steps").mkdir()
    found = serve_sglang.Asked()
    found.engine, found.log = Engine(folder), serve_sglang.SchedulerLog(folder)
    return found


def test_every_part_writes_its_rows(
    asked: serve_sglang.Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-6 * next(ticks))
    monkeypatch.setattr(serve_sglang, "DECODES", ((4, 128),))
    monkeypatch.setattr(serve_work, "CROWDS", {"crowd": (9, 64, 7), "long_crowd": (3, 1024, 7)})
    side = serve_work.SideFile(tmp_path / "side.json", float("inf"), {"head": {}})
    serve_sglang.measure(side, asked, list(serve_sglang.PARTS))
    kept = json.loads((tmp_path / "side.json").read_text())
    assert kept["failed"] == {} and kept["left_out"] == []
    assert [row["what"] for row in kept["rows"]] == [
        "first request, 1 × 2,048",
        *(serve_work.call_name(*shape) for shape in serve_work.CALLS),
        "mixed load of 64 requests",
        "9 requests at once, 64 in and 7 out",
        "3 requests at once, 1,024 in and 7 out",
        "decode step, 4 × 128",
    ]
    assert kept["tokens_summary"]["distinct_tokens"] == 1
    profile = kept["profiles"][0]
    assert profile["what"] == "1 × 128" and set(profile["kernels"]) == {"gemm", "Memcpy"}
    assert profile["gpu_ms"] == pytest.approx(0.01) and profile["busy"] == pytest.approx(2 / 3)
    # 32 steps of 16 microseconds end 15 steps before the last one
    profile = kept["profiles"][-1]
    assert profile["what"] == "decode step, 16 × 128" and set(profile["kernels"]) == {"step"}
    assert profile["gpu_ms"] * 32 == pytest.approx(0.5)


def test_decodes_without_room_are_left_out(
    asked: serve_sglang.Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_sglang, "DECODES", ((4, 128), (2, 128), (1, 512)))
    side = serve_work.SideFile(tmp_path / "side.json", float("inf"), {"head": {}})
    tokens = 2 * (128 + serve_sglang.new_tokens(2, 128))
    serve_sglang.measure(side, asked, ["decode"], (3, tokens))
    assert [row["what"] for row in side.data["rows"]] == ["decode step, 2 × 128"]
    assert side.data["left_out"] == ["decode step, 4 × 128", "decode step, 1 × 512"]
    state = {"effective_max_running_requests_per_dp": 48}
    assert serve_sglang.room_of({"internal_states": [state], "max_total_num_tokens": 7}) == (48, 7)
    assert serve_sglang.room_of({}) == (float("inf"), float("inf"))


def test_a_schedulers_steps_are_those_of_the_call(tmp_path: Path) -> None:
    """A step that verifies drafts has the tokens of each, and what is half written is left."""
    log = serve_sglang.SchedulerLog(tmp_path, drafts=4)
    with pytest.raises(RuntimeError, match=f"scheduler in {tmp_path}, got none"):
        log.of(lambda: None)
    file = tmp_path / "7"
    file.write_text(f"{time.perf_counter()} 3\n")

    def call() -> None:
        now = time.perf_counter()
        with file.open("a") as more:
            more.write(f"{now} 0\n{now + 1} 2\n{now + 2}")

    assert [tokens for _, tokens in log.of(call)] == [serve_sglang.PREFILL, 10]


def test_no_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="got 0"):
        serve_sglang.traces(tmp_path, 1, 0.6)
