"""The sglang benchmark without sglang: an engine that answers at once, and a trace's kernels."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import serve_sglang
from benchmarks.engines import serve_work


class Engine:
    """Answers at once; a profile has two kernels of a call, and one a millisecond of a stream."""

    streamed = False

    def generate(
        self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]], **more: Any
    ) -> Any:
        assert len(input_ids) == len(sampling_params)
        self.streamed = more.get("stream", False)
        if self.streamed:
            return self.stream(sampling_params)
        return [
            {
                "output_ids": [5] * one["max_new_tokens"],
                "meta_info": {
                    "output_top_logprobs": [[(-1.0, 5, None), (-1.5, 9, None)]]
                    * one["max_new_tokens"],
                    "cached_tokens": 64,
                },
            }
            for one in sampling_params
        ]

    def stream(self, sampling_params: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for step in range(sampling_params[0]["max_new_tokens"]):
            for index in range(len(sampling_params)):
                yield {"index": index, "meta_info": {"completion_tokens": 1 + step}}

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
        if self.streamed:
            step = {"name": "step", "cat": "kernel", "dur": 500}
            events = [{**step, "ts": 1000 * at} for at in range(10)]
        text = json.dumps({"traceEvents": events}).encode()
        (self.place / "1").mkdir()
        (self.place / "1" / "TP-0.trace.json.gz").write_bytes(gzip.compress(text))


@pytest.fixture(autouse=True)
def decodes_are_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_work, "DECODE_S", 0.0)


def asked() -> serve_sglang.Asked:
    found = serve_sglang.Asked()
    found.engine = Engine()
    return found


def test_every_part_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-6 * next(ticks))
    monkeypatch.setattr(serve_sglang, "DECODES", ((4, 128),))
    monkeypatch.setattr(serve_work, "CROWDS", {"crowd": (9, 64, 7), "long_crowd": (3, 1024, 7)})
    side = serve_work.SideFile(tmp_path / "side.json", float("inf"), {"head": {}})
    serve_sglang.measure(side, asked(), list(serve_sglang.PARTS))
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
    # 32 steps of 16 tokens, one each microsecond, end 15 of them before the last token
    profile = kept["profiles"][-1]
    assert profile["what"] == "decode step, 16 × 128" and set(profile["kernels"]) == {"step"}
    assert profile["gpu_ms"] * 32 == pytest.approx(0.5)


def test_decodes_without_room_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_sglang, "DECODES", ((4, 128), (2, 128), (1, 512)))
    side = serve_work.SideFile(tmp_path / "side.json", float("inf"), {"head": {}})
    tokens = 2 * (128 + serve_sglang.new_tokens(2, 128))
    serve_sglang.measure(side, asked(), ["decode"], (3, tokens))
    assert [row["what"] for row in side.data["rows"]] == ["decode step, 2 × 128"]
    assert side.data["left_out"] == ["decode step, 4 × 128", "decode step, 1 × 512"]
    state = {"effective_max_running_requests_per_dp": 48}
    assert serve_sglang.room_of({"internal_states": [state], "max_total_num_tokens": 7}) == (48, 7)
    assert serve_sglang.room_of({}) == (float("inf"), float("inf"))


def test_steps_are_timed_while_all_sequences_decode() -> None:
    first = [(0.01 * i, i) for i in range(12)]
    last = [(0.05 + 0.01 * i, i) for i in range(20)]
    with pytest.raises(ValueError, match="at least 8 steps while all decode, got 6"):
        serve_sglang.decoded([first, last])
    found = serve_sglang.decoded([[(0.01 * i, i) for i in range(60)], last])
    assert found == (19, pytest.approx(190.0), pytest.approx(350.0))


def test_a_late_client_does_not_change_a_steps_time() -> None:
    """sglang then merges what several steps have made."""
    merged = [(0.01 * i, i) for i in range(64) if i % 7 in (0, 1)]
    assert serve_sglang.decoded([merged]) == (28, pytest.approx(280.0), pytest.approx(0.0))


@pytest.mark.parametrize("drafts", [0, 4])
def test_chunks_say_how_many_steps_the_engine_has_made(drafts: int) -> None:
    """With drafts a step makes several tokens; the first token is of none."""
    made = [{"completion_tokens": 1}, {"completion_tokens": 4, "spec_verify_ct": 1}]
    found = serve_sglang.Asked()
    found.drafts = drafts
    chunks = [{"index": 0, "meta_info": one} for one in made]
    found.engine = SimpleNamespace(generate=lambda **_: chunks)
    steps = [step for _, step in found.arrivals([[1, 2]], 4)[0]]
    assert steps == ([0, 1] if drafts else [1, 4])


def test_no_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="got 0"):
        serve_sglang.traces(tmp_path, 1, 0.6)
