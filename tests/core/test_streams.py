"""A scratch memory that two streams share: its calls take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend_core.launch import streams
from backend_core.launch.streams import StreamOrder


class Stream:
    def __init__(self, raw: int, log: list[str]) -> None:
        self.raw, self.log = raw, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.raw} waits for {other.raw}")


class Memory:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"kept for {stream.raw}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Streams by number; ``gpu.now`` is the current one, ``gpu.captures`` whether it captures."""

    class Gpu:
        now, captures = 7, False

        def __init__(self) -> None:
            self.log: list[str] = []

    state = Gpu()
    monkeypatch.setattr(streams, "_raw_stream", lambda device: state.now)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(state.now, state.log))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    return state


def test_only_a_change_of_stream_waits(gpu: Any) -> None:
    order, memory = StreamOrder(torch.device("cuda", 0)), Memory(gpu.log)
    for gpu.now in (7, 7, 7):
        order.enter(memory)  # type: ignore[arg-type]
    assert gpu.log == []
    for gpu.now in (8, 8, 7):
        order.enter(memory)  # type: ignore[arg-type]
    assert gpu.log == ["8 waits for 7", "kept for 8", "7 waits for 8", "kept for 7"]


def test_a_capture_waits_for_nothing_and_is_not_remembered(gpu: Any) -> None:
    order = StreamOrder(torch.device("cuda", 0))
    order.enter()
    gpu.now, gpu.captures = 9, True
    order.enter()
    gpu.now, gpu.captures = 7, False
    order.enter()
    assert gpu.log == []


def test_a_cpu_has_no_streams() -> None:
    StreamOrder(torch.device("cpu")).enter(torch.zeros(1))
