"""The comparison of graphs with eager calls, around sglang's own mixin on the CPU.

There is no graph here: a replay is the captured call made again, on tensors that were filled anew.
Upstream's kernels are C++ that needs a GPU, so that this package's stand in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from benchmarks.engines import dsv4_sglang_watch
from benchmarks.engines.dsv4_sglang_watch import Watch
from dsv4_backend.engines import sglang_compressor
from dsv4_backend.engines.sglang_compressor import FusedStep
from tests.dsv4.cases import make_history
from tests.engines.dsv4.sglang.harness import Served

PADDED = 2  # of three rows of the graph two are of requests


class Runner:
    """The part of sglang's ModelRunner that is watched."""

    is_draft_worker = False

    def __init__(self) -> None:
        self.decode_cuda_graph_runner = SimpleNamespace(
            bs=3, captured_req_width=1, raw_num_token=PADDED
        )
        self.work: Any = None
        self.graph = False

    def forward(self, batch: Any) -> Any:
        self.work()
        return SimpleNamespace(can_run_graph=self.graph)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(FusedStep, "__call__", FusedStep.__call__)
    monkeypatch.setattr(Runner, "forward", Runner.forward)
    monkeypatch.setattr(sglang_compressor, "_refusal", lambda kind: None)
    monkeypatch.setattr(dsv4_sglang_watch, "LEAST_PLANTED", 1)
    monkeypatch.setattr(Watch, "_upstream", Watch._ours)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = Watch(Runner)
    made.on = True
    yield made


def batch(mode: ForwardMode, prefixes: list[int] | None = None) -> Any:
    return SimpleNamespace(forward_mode=mode, extend_prefix_lens_cpu=prefixes)


def prepared(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> tuple[Served, Runner, Any]:
    """Two requests whose windows end with the next token, and a graph of three rows."""
    served = Served("fp8_ds_mla", 4, [33, 30, 20])
    histories = [make_history(served.layer.spec, n, seed=i) for i, n in enumerate((33, 30, 20))]
    runner = Runner()
    runner.work = lambda: served.run(histories, [(0, 0, 11), (1, 0, 7), (2, 0, 3)])
    runner.forward(batch(ForwardMode.EXTEND, [0, 0, 0]))
    runner.forward(batch(ForwardMode.EXTEND, [0, 0, 0]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    served.run(histories, [(0, 11, 12), (1, 7, 8), (2, 3, 4)])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    runner.graph = True
    return served, runner, histories


def test_a_replay_is_beside_eager_calls(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    _, runner, _ = prepared(monkeypatch, watch)
    (kept,) = watch.inputs["FULL", 3].values()
    runner.work = lambda: watch.step(kept.fused, **kept.call)
    runner.forward(batch(ForwardMode.DECODE))
    report = watch.report()
    steps = [(s["graph"], s["kind"], s["size"], s["equal"], s["of"]) for s in report["steps"]]
    assert steps == [("FULL", "decode", 3, 1, 1), ("NONE", "prefill", 0, 1, 1)]
    assert report["failures"] == []
    assert report["planted_errors_seen"] == {"FULL decode": True, "NONE prefill": True}
    # a record in the prompt of 7 tokens and two in that of 11; one of each request in the graph
    assert report["records_written"] == 3 + PADDED
    assert report["bytes_unlike_upstream"] == report["records_unlike_upstream"] == 0


@pytest.mark.parametrize("row", [0, 2])
def test_a_wrong_row_of_a_request_is_found(
    row: int, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """What a graph leaves in the slots of its padded rows does not count."""
    _, runner, _ = prepared(monkeypatch, watch)
    (kept,) = watch.inputs["FULL", 3].values()

    def replay() -> None:
        wrong = kept.call["kv_score_input"].clone()
        wrong[row] += 1.0
        watch.step(kept.fused, **{**kept.call, "kv_score_input": wrong})

    runner.work = replay
    runner.forward(batch(ForwardMode.DECODE))
    full = watch.report()["steps"][0]
    assert full["of"] == 1 and full["equal"] == int(row >= PADDED)
    assert bool(watch.failures) == (row < PADDED)


def test_bytes_unlike_upstreams_are_named(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    _, runner, _ = prepared(monkeypatch, watch)
    (kept,) = watch.inputs["FULL", 3].values()
    pages = kept.bound.pages

    def upstream(self: Watch, kept: Any) -> None:
        watch._ours(kept)
        _, _, _, slots = dsv4_sglang_watch.entries_of(kept)
        pages[slots[0] // kept.rows, (slots[0] % kept.rows) * 576] ^= 1

    monkeypatch.setattr(Watch, "_upstream", upstream)
    runner.work = lambda: watch.step(kept.fused, **kept.call)
    before = watch.records[0]
    runner.forward(batch(ForwardMode.DECODE))
    assert watch.records[0] - before == 1 and watch.failures == []
    assert any(kind.startswith("e4m3 of a main record") for kind in watch.kinds)


def test_sinkhorn_rows_and_columns_sum_up_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    mixes = torch.randn(5, 1, 24, generator=generator)
    scale, base = torch.ones(3), torch.randn(24, generator=generator)
    pre, post, comb = dsv4_sglang_watch.split_sinkhorn(mixes, scale, base, 4, 40, 1e-6)
    assert pre.shape == post.shape == (5, 1, 4) and comb.shape == (5, 1, 4, 4)
    ones = torch.ones(5, 1, 4)
    torch.testing.assert_close(comb.sum(-1), ones, atol=1e-3, rtol=0)
    torch.testing.assert_close(comb.sum(-2), ones, atol=1e-3, rtol=0)
    assert bool(((post > 0) & (post < 2)).all()) and bool((pre > 0).all())
