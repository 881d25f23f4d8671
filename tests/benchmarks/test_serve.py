"""The serve benchmarks without a GPU: an engine that answers at once, and the joined file."""

from __future__ import annotations

import json
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import serve_vllm
from benchmarks.engines import decode_vllm, serve_agreement, serve_profile, serve_work

BUDGET = 512


class Scheduled:
    def __init__(self, tokens: int) -> None:
        self.total_num_scheduled_tokens = tokens


class Engine:
    """Schedules prompts in pieces of `BUDGET` tokens, then one token of each per step."""

    def __init__(self) -> None:
        self.scheduler = self
        self.engine_core = self
        self.llm_engine = types.SimpleNamespace(engine_core=self)

    def schedule(self, throttle: bool) -> Scheduled:
        tokens = min(self.waiting, BUDGET) or self.running
        self.waiting -= min(self.waiting, BUDGET)
        return Scheduled(tokens)

    def generate(self, batch: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        self.waiting = sum(len(one["prompt_token_ids"]) for one in batch)
        self.running = len(batch)
        sampling = sampling if isinstance(sampling, list) else [sampling] * len(batch)
        for _ in range(-(-self.waiting // BUDGET) + max(one.max_tokens for one in sampling) - 1):
            self.schedule(False)
        self.running = 0
        self.schedule(False)  # an engine looks once more
        return [answer(one.max_tokens) for one in sampling]


def answer(tokens: int) -> Any:
    two_best = {5: types.SimpleNamespace(logprob=-1.0), 9: types.SimpleNamespace(logprob=-1.5)}
    completion = types.SimpleNamespace(token_ids=[5] * tokens, logprobs=[two_best] * tokens)
    return types.SimpleNamespace(outputs=[completion])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> serve_vllm.Asked:
    vllm = types.ModuleType("vllm")
    vllm.SamplingParams = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(serve_vllm, "BUDGET", BUDGET)
    monkeypatch.setattr(serve_work, "DECODE_LONG", ((4, 2048),))
    monkeypatch.setattr(serve_work, "SHARED_PROMPT", (4, 2048))

    def spans(call: Any) -> list[tuple[str, float, float]]:
        call()
        return [("gemm", 0.0, 2000.0), ("kda_decode_step", 3000.0, 4000.0)]

    monkeypatch.setattr(serve_profile, "spans_of", spans)
    engine = Engine()
    return serve_vllm.Asked(engine, decode_vllm.StepLog(engine))


def side_file(path: Path, until: float = float("inf")) -> serve_work.SideFile:
    head = {"gpu": "none", "engine": "fake", "torch": "-", "triton": "-", "date": "2026-11-22"}
    return serve_work.SideFile(path, until, {"head": head})


def test_every_part_writes_its_rows(asked: serve_vllm.Asked, tmp_path: Path) -> None:
    side = side_file(tmp_path / "side.json")
    serve_vllm.measure(side, asked, list(serve_vllm.PARTS))
    kept = json.loads((tmp_path / "side.json").read_text())
    assert kept["failed"] == {} and kept["left_out"] == []
    names = [row["what"] for row in kept["rows"]]
    calls = [serve_work.call_name(*shape) for shape in serve_work.CALLS]
    steps = [serve_work.decode_name(*s) for s in (*serve_work.DECODE_SHORT, (4, 2048))]
    assert set(names) == {
        "first request, 1 × 2,048",
        *calls,
        *steps,
        "decode step, 4 × 2,048 of one prompt",
        "mixed load of 48 requests",
    }
    cut = next(row for row in kept["rows"] if row["what"] == "1 × 2,048")
    assert cut["steps"] == [BUDGET] * 4
    assert [profile["what"] for profile in kept["profiles"]] == [
        "1 × 512",
        "1 × 2,048",
        "1 × 8,192",
    ]
    assert kept["host"]["functions"] and kept["tokens_summary"]["distinct_tokens"] == 1


def test_a_part_that_fails_or_has_no_time_is_named(tmp_path: Path) -> None:
    side = side_file(tmp_path / "side.json", time.time() + 100)
    side.part("broken", 1, lambda: 1 / 0)
    side.part("long", 1000, lambda: pytest.fail("there was no time for it"))
    side.part("short", 1, lambda: {"x": 1})
    kept = json.loads((tmp_path / "side.json").read_text())
    assert "division by zero" in kept["failed"]["broken"]
    assert kept["left_out"] == ["long"] and kept["short"] == {"x": 1}


def test_decode_steps_are_those_after_the_last_piece_of_a_prompt() -> None:
    steps = [(0.0, 512), (1.0, 515), (1.5, 4), (1.51, 4), (1.53, 4), (1.56, 3)]
    with pytest.raises(ValueError, match=r"at least 8 decode steps of 4 sequences, got 2"):
        decode_vllm.pure_steps_ms(steps, 4)
    steps += [(2.0, 700)] + [(3.0 + 0.01 * i, 4) for i in range(12)]
    times = decode_vllm.pure_steps_ms(steps, 4)
    assert len(times) == 11 and times == pytest.approx([10.0] * 11)


def test_the_gpus_busy_share_counts_overlap_once() -> None:
    spans = [("a", 0.0, 100.0), ("b", 50.0, 150.0), ("a", 200.0, 250.0)]
    found = serve_profile.summary(spans)
    assert found["gpu_ms"] == pytest.approx(0.25) and found["span_ms"] == pytest.approx(0.25)
    assert found["busy"] == pytest.approx(0.8) and found["longest_gaps_ms"] == pytest.approx([0.05])
    assert found["kernels"] == {"a": [pytest.approx(0.15), 2], "b": [pytest.approx(0.1), 1]}
    with pytest.raises(ValueError, match="got none"):
        serve_profile.summary([])


CHILD = """
    import json, sys
    out = sys.argv[2]
    side = "flag" if "--attention-backend" in sys.argv else "upstream"
    ms = {"flag": 2.0, "upstream": 3.0}[side]
    row = {"what": "1 × 128", "kind": "call", "ms": ms}
    head = {"gpu": "none", "engine": "fake"}
    data = {"head": head, "rows": [row], "left_out": [], "failed": {}}
    print("| said by", side)
    print("not shown")
    if "--break" in sys.argv and side == "flag":
        raise SystemExit("broken as asked")
    open(out, "w").write(json.dumps(data))
"""


@pytest.mark.parametrize("broken", [False, True])
def test_a_pair_is_joined_by_what_was_measured(
    broken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "fake_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    extra = ["--break"] if broken else []
    sides = {"upstream": extra, "flag": [*extra, "--attention-backend", "KDA"]}
    failed = serve_work.pair("fake_child", sides, tmp_path / "out.json", 60.0)
    shown = capfd.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert "| said by upstream" in shown and ("not shown" in shown) == broken
    assert result["engine"] == "fake" and result["mode"] == "default"
    row = {"what": "1 × 128", "kind": "call", "upstream_ms": 3.0}
    assert result["rows"] == [row if broken else {**row, "flag_ms": 2.0}]
    assert failed == int(broken) and ("broken as asked" in shown) == broken
    assert "1.50" in shown or broken


def test_a_flag_that_did_not_serve_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fake_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sides = {"flag": ["--attention-backend", "KDA"], "upstream": []}
    out = tmp_path / "out.json"
    assert serve_work.pair("fake_child", sides, out, 60.0, "KDA layers on") == 1
    failed = json.loads(out.read_text())["sides"]["flag"]["failed"]
    assert failed == {"served": "expected a line with 'KDA layers on' in the log"}


def greedy(tokens: list[int], margin: float) -> dict[str, Any]:
    tokens = tokens * serve_agreement.NEW_TOKENS
    one = {
        "tokens": tokens,
        "best": [[t, 1] for t in tokens],
        "logprobs": [[-0.5, -0.5 - margin]] * len(tokens),
    }
    many = [one] * serve_agreement.PROMPTS
    return {"lengths": [1], "together": many, "apart": many[: serve_agreement.APART]}


def test_tokens_of_both_sides_are_compared() -> None:
    same = serve_agreement.compared(greedy([7], 0.5), greedy([7], 0.5))
    assert same["upstream and flag, together"]["same"] == serve_agreement.PROMPTS
    other = serve_agreement.compared(greedy([7], 0.5), greedy([8], 0.5))
    found = other["upstream and flag, together"]
    assert found["same"] == 0 and found["explained"] == 0
    with pytest.raises(ValueError, match="same prompts"):
        serve_agreement.compared(greedy([7], 0.5), {**greedy([7], 0.5), "lengths": [2]})
    assert serve_agreement.collapse(greedy([7], 0.5))["distinct_tokens"] == 1


def test_what_an_engine_compiles_in_its_first_mixed_load_does_not_count() -> None:
    """Planted: 6 s in the middle of the first one."""
    seconds = iter((9.0, 3.0, 3.2))
    found = serve_work.mixed_row(lambda prompts, new_tokens: next(seconds))
    assert found["ms"] == pytest.approx(3100.0) and found["first_ms"] == 9000.0
    assert found["runs_ms"] == [3000.0, 3200.0]
