"""The serve benchmarks without a GPU: an engine that answers at once, and the joined file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import threading
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import serve_vllm
from benchmarks.engines import (
    decode_steps,
    decode_vllm,
    serve_agreement,
    serve_model,
    serve_profile,
    serve_sides,
    serve_work,
)
from kda_backend.fla import chunk_kda
from kda_backend.prefill import paths

BUDGET = 512
CONFIGS = Path(serve_work.__file__).parent / "configs"


class Scheduled:
    def __init__(self, tokens: int, running: int) -> None:
        self.total_num_scheduled_tokens = tokens
        self.num_scheduled_tokens = dict.fromkeys(range(running), 1)


class Engine:
    """Schedules prompts in pieces of `BUDGET` tokens, then one token of each per step."""

    def __init__(self) -> None:
        self.scheduler = self
        self.engine_core = self
        self.llm_engine = types.SimpleNamespace(engine_core=self)
        self.busy = 1  # refuses so often to empty its prefix cache

    def collective_rpc(self, call: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [call(self, *args)]

    def reset_prefix_cache(self) -> bool:
        self.busy -= 1
        return self.busy < 0

    def schedule(self, throttle: bool) -> Scheduled:
        tokens = min(self.waiting, BUDGET) or self.running
        self.waiting -= min(self.waiting, BUDGET)
        return Scheduled(tokens, self.running)

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
    return types.SimpleNamespace(outputs=[completion], num_cached_tokens=1920)


@pytest.fixture(autouse=True)
def decodes_are_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_work, "DECODE_S", 0.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> serve_vllm.Asked:
    vllm = types.ModuleType("vllm")
    vllm.SamplingParams = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(serve_vllm, "BUDGET", BUDGET)
    monkeypatch.setattr(serve_work, "DECODE_LONG", ((4, 2048),))
    monkeypatch.setattr(serve_work, "SHARED_PROMPT", (4, 2048))
    monkeypatch.setattr(serve_work, "CROWDS", {"crowd": (9, 64, 7), "long_crowd": (3, 1024, 7)})

    class Trace:
        def spans(self) -> list[serve_profile.Span]:
            return [
                *(("gemm", 0.0, 2000.0), ("kda_decode_step", 3000.0, 4000.0)),
                ("sample", 4000.0, 4000.0),  # in the last step, however short
            ]

    monkeypatch.setattr(serve_profile, "Trace", Trace)
    asked = serve_vllm.Asked()
    asked.llm = Engine()
    asked.log = decode_vllm.StepLog(asked.llm)
    return asked


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
        "mixed load of 64 requests",
        "9 requests at once, 64 in and 7 out",
        "3 requests at once, 1,024 in and 7 out",
    }
    assert [row["running"] for row in kept["rows"] if row["kind"] == "crowd"] == [9, 3]
    cut = next(row for row in kept["rows"] if row["what"] == "1 × 2,048")
    assert cut["steps"] == [BUDGET] * 4
    assert [profile["what"] for profile in kept["profiles"]] == [
        "1 × 128",
        "1 × 512",
        "1 × 2,048",
        "1 × 8,192",
        "decode step, 256 × 128",
    ]
    assert asked.llm.busy == -1  # emptied before prompts are asked again, but not the long ones
    assert kept["tokens_summary"]["distinct_tokens"] == 1
    long = kept["long_tokens"]
    assert len(long["lengths"]) == len(long["apart"]) == len(long["resumed"]) == 16
    assert all(4096 <= length <= 9000 for length in long["lengths"])
    assert kept["long_tokens_summary"]["cached"] == [1920] * 16


def test_prompts_that_the_prefix_cache_does_not_hold_are_an_error(
    asked: serve_vllm.Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = asked.greedy
    monkeypatch.setattr(asked, "greedy", lambda some: [{**x, "cached": 0} for x in greedy(some)])
    side = side_file(tmp_path / "side.json")
    serve_work.tokens_part(side, asked, (100, 200))
    assert "resume from the prefix cache, got none" in side.data["failed"]["long_tokens"]


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
        decode_steps.pure_steps_ms(steps, 4)
    steps += [(2.0, 700)] + [(3.0 + 0.01 * i, 4) for i in range(12)]
    times = decode_steps.pure_steps_ms(steps, 4)
    assert len(times) == 11 and times == pytest.approx([10.0] * 11)


def test_a_decode_step_verifies_the_drafts_of_each_sequence() -> None:
    asked: list[None] = []
    log = types.SimpleNamespace(of=lambda call: (call(), steps)[1])
    steps = [(0.0, 512), *((1.0 + 0.01 * i, 20) for i in range(12)), (2.0, 10)]
    row = decode_steps.step_row(log, 4, lambda: asked.append(None), "a step", drafts=4)
    assert row["ms"] == pytest.approx(10.0) and row["steps"] == 11 * len(asked) == 22
    assert decode_steps.new_tokens(4, 128, BUDGET, drafts=4) >= 5 * decode_steps.STEPS


def test_the_gpus_busy_share_counts_overlap_once() -> None:
    spans = [("a", 0.0, 100.0), ("b", 50.0, 150.0), ("a", 200.0, 250.0)]
    found = serve_profile.summary(spans)
    assert found["gpu_ms"] == pytest.approx(0.25) and found["span_ms"] == pytest.approx(0.25)
    assert found["busy"] == pytest.approx(0.8)
    assert found["kernels"] == {"a": [pytest.approx(0.15), 2], "b": [pytest.approx(0.1), 1]}
    with pytest.raises(ValueError, match="got none"):
        serve_profile.summary([])
    steps = serve_profile.summary(serve_profile.last([("p", 0.0, 900.0), *shifted(spans)], 0.25), 2)
    assert steps["span_ms"] == pytest.approx(0.125) and steps["busy"] == pytest.approx(0.8)
    assert steps["kernels"] == {"a": [pytest.approx(0.075), 1], "b": [pytest.approx(0.05), 0.5]}


def shifted(spans: list[serve_profile.Span]) -> list[serve_profile.Span]:
    return [(name, start + 1000, end + 1000) for name, start, end in spans]


CHILD = """
    import json, os, sys, time
    out = sys.argv[2]
    print("| GPUs", sys.argv[2].rpartition("_")[2], os.environ.get("CUDA_VISIBLE_DEVICES"))
    side = "flag" if "--attention-backend" in sys.argv else "upstream"
    side = "variant" if "--variant" in sys.argv else side
    ms = {"flag": 2.0, "upstream": 3.0, "variant": 2.5}[side]
    if "--turns" in sys.argv:
        from pathlib import Path
        from benchmarks.engines.serve_work import Turn
        is_alone = "--own-gpu" not in sys.argv
        turn = Turn(Path(sys.argv[sys.argv.index("--turns") + 1]), is_alone=is_alone)
        time.sleep(0.6 if side == "upstream" else 0.1)
        turn.take(time.time() + 60)
        begin = time.time()
        time.sleep(0.3)
        print("| timed", begin, time.time())
    row = {"what": "1 × 128", "kind": "call", "ms": ms}
    head = {"gpu": "none", "engine": "fake"}
    data = {"head": head, "rows": [row], "left_out": [], "failed": {}}
    print("| said by", side)
    print("not shown")
    if "--break" in sys.argv and side == "flag":
        raise SystemExit("broken as asked")
    open(out, "w").write(json.dumps(data))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that stands in for one side's process."""
    (tmp_path / "fake_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    return "fake_child"


@pytest.mark.parametrize("broken", [False, True])
def test_a_pair_is_joined_by_what_was_measured(
    broken: bool, child: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = ["--break"] if broken else []
    sides = {"upstream": extra, "flag": [*extra, "--attention-backend", "KDA"]}
    failed = serve_sides.pair(child, sides, tmp_path / "out.json", 60.0)
    shown = capfd.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert "| said by upstream" in shown and ("not shown" in shown) == broken
    assert result["engine"] == "fake" and result["mode"] == "default"
    row = {"what": "1 × 128", "kind": "call", "upstream_ms": 3.0}
    assert result["rows"] == [row if broken else {**row, "flag_ms": 2.0}]
    assert failed == int(broken) and ("broken as asked" in shown) == broken
    assert "1.50" in shown or broken


@pytest.mark.parametrize("is_alone", [True, False], ids=["one GPU", "a GPU for each"])
def test_sides_beside_each_other_are_timed_when_all_have_loaded(
    is_alone: bool, child: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = [] if is_alone else ["--own-gpu"]
    flag = [*own, "--attention-backend", "KDA"]
    sides = {"flag": flag, "upstream": own, "deterministic_prefix": [*flag, "--variant", "x"]}
    out = tmp_path / "out.json"
    assert serve_sides.pair(child, sides, out, 60.0, is_beside=True) == 0
    result = json.loads(out.read_text())
    assert result["beside"] and set(result["sides"]) == set(sides)
    (row,) = result["rows"]
    times = {key: row[key] for key in row if key.endswith("_ms")}
    assert times == {"upstream_ms": 3.0, "flag_ms": 2.0, "deterministic_prefix_ms": 2.5}
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("| timed")]
    spans = sorted((float(line.split()[2]), float(line.split()[3])) for line in lines)
    assert len(spans) == 3
    if is_alone:
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    else:
        assert spans[-1][0] < min(end for _, end in spans)


@pytest.mark.parametrize("visible", ["", "4,5,6,7"])
def test_sides_that_are_spread_have_gpus_of_their_own(
    visible: str,
    child: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sides = {"flag": ["--attention-backend", "KDA"], "upstream": []}
    out = tmp_path / "out.json"
    assert serve_sides.pair(child, sides, out, 60.0, spread_ranks=2) == 0
    assert json.loads(out.read_text())["rows"][0]["flag_ms"] == 2.0
    lines = capfd.readouterr().out.splitlines()
    gpus = {line for line in lines if line.startswith("| GPUs")}
    first = 4 if visible else 0
    assert gpus == {
        f"| GPUs flag.json {first},{first + 1}",
        f"| GPUs upstream.json {first + 2},{first + 3}",
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(ValueError, match="expected 4 GPUs, got CUDA_VISIBLE_DEVICES=4,5,6"):
        serve_work.gpus(4)


def test_sides_that_end_at_the_same_time_are_all_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, held = threading.Barrier(2), threading.Lock()
    write = serve_sides.write_record

    def run_side(*args: Any) -> dict[str, Any]:
        end.wait(10)
        ms = {"what": "1 x 1", "kind": "call", "ms": 2.0}
        return {"rows": [ms], "said": [], "failed": {}, "left_out": []}

    def slow(path: Path, document: dict[str, Any]) -> None:
        assert held.acquire(blocking=False)
        time.sleep(0.1)
        write(path, document)
        held.release()

    monkeypatch.setattr(serve_sides, "run_side", run_side)
    monkeypatch.setattr(serve_sides, "write_record", slow)
    out = tmp_path / "out.json"
    sides: dict[str, list[str]] = {"flag": [], "upstream": []}
    assert serve_sides.pair("any", sides, out, 60.0, spread_ranks=1) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["flag_ms"] == row["upstream_ms"] == 2.0


def test_a_prefill_says_its_path_once_for_each_size(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(paths, "path_of", paths.path_of)  # put back afterwards
    serve_work.say_paths(paths)
    for length in (70, 70, 5):
        q, k, v, gate = (torch.randn(1, length, 2, 16) for _ in range(4))
        chunk_kda(q, k, v, -gate.exp(), torch.rand(1, length, 2))
    log = capfd.readouterr().out
    assert log.count(serve_work.PATH) == 2
    assert serve_sides.seen_in(log)["paths"] == {"torch": {"captured": [], "eager": [70, 5]}}


def test_a_log_says_which_paths_ran_and_which_steps_were_replayed() -> None:
    log = """
    KDA prefill by two_stage_sm90: 512 tokens, eager
    KDA prefill by two_stage_sm90: 512 tokens, captured
    KDA prefill by segmented_sm90: 8192 tokens, eager
    Prefill batch, #new-seq: 1, #new-token: 300, #cached-token: 0, cuda graph: True, input
    Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 0, cuda graph: True, input
    Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, cuda graph: False, input
    """
    assert serve_sides.seen_in(log) == {
        "paths": {
            "two_stage_sm90": {"captured": [512], "eager": [512]},
            "segmented_sm90": {"captured": [], "eager": [8192]},
        },
        "prefill_steps": {"steps": 3, "in_graphs": 2, "replayed": 1},
    }
    assert serve_sides.seen_in("") == {"paths": {}}


def options(*words: str) -> argparse.Namespace:
    """Those of one side of vLLM's, as its parent gives them."""
    found = {}

    def run(args: argparse.Namespace) -> int:
        found["args"] = args
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_vllm, "run", run)
        patch.setattr(sys, "argv", ["serve_vllm", "run", "side.json", *words])
        assert serve_vllm.main() == 0
    return found["args"]


@pytest.mark.parametrize("place", sorted(CONFIGS.glob("*/config.json")))
def test_a_model_is_cut_to_layers_heads_and_experts(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    words = ["--config", str(place.parent), "--layers", "4", "--heads", "8", "--experts", "32"]
    args = options(*words, "--calls", "1x512", "2x64")
    assert args.calls == [(1, 512), (2, 64)] and "long_tokens" not in args.parts
    cut = json.loads((Path(serve_model.model_directory(args)) / "config.json").read_text())
    text = cut.get("text_config", cut)
    assert text["num_hidden_layers"] == 4 and text["num_attention_heads"] == 8
    assert text.get("num_experts", text.get("n_routed_experts")) == 32
    dense = options(*words[:-1], "0")
    cut = json.loads((Path(serve_model.model_directory(dense)) / "config.json").read_text())
    assert cut.get("text_config", cut)["first_k_dense_replace"] == 4
    if "linear_attn_config" in text:
        linear = text["linear_attn_config"]
        assert len(linear["kda_layers"]) == 3 and len(linear["full_attn_layers"]) == 1
        assert linear["num_heads"] == 8


def test_a_configuration_of_an_unknown_type_is_read(tmp_path: Path) -> None:
    from transformers import AutoConfig

    kind = "published_with_its_own_code"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "layer_group_size": 4}))
    with pytest.raises(ValueError, match=kind):
        AutoConfig.from_pretrained(tmp_path)
    serve_model.register_config(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).layer_group_size == 4
    serve_model.register_config(tmp_path)


@pytest.mark.parametrize("command", ["pair", "run"])
def test_a_draft_layer_without_drafts_is_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = [str(tmp_path), "x"] if command == "pair" else ["x", "--config", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["serve_vllm", command, *folder, "--draft-layer"])
    with pytest.raises(SystemExit):
        serve_vllm.main()
    assert "expected --drafts beside --draft-layer" in capsys.readouterr().err


def test_drafts_of_random_weights_are_often_right() -> None:
    """Of a toy whose layer and draft layer each add something of their own."""
    hidden, tokens = 512, torch.arange(512)
    model = torch.nn.Module()
    model.config = types.SimpleNamespace(text_config={}, num_nextn_predict_layers=1)
    model.config.text_config = model.config
    model.embed_tokens = torch.nn.Embedding(512, hidden)
    model.lm_head, model.layer = torch.nn.Linear(hidden, 512), torch.nn.Linear(hidden, hidden)
    model.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
    with torch.no_grad():
        for scale, least in ((1, 0.5), (0, 0.0)):
            model.config.num_nextn_predict_layers = scale
            serve_model.draw_weights(model)
            x = model.embed_tokens(tokens)
            norm = torch.nn.functional.layer_norm
            unit = norm(x, (hidden,))
            target = norm(x + model.layer(unit), (hidden,))
            own = torch.cat((unit, norm(target, (hidden,))), -1)
            guess = model.eh_proj(own)
            guess = norm(guess + model.layer(norm(guess, (hidden,)).flip(1)), (hidden,))
            right = (model.lm_head(guess).argmax(1) == model.lm_head(target).argmax(1)).float()
            assert least <= right.mean() < (0.95 if scale else 0.05)


def test_each_side_is_given_the_options_of_the_pair(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["--config", str(tmp_path), "--heads", "4", "--parts", "calls", "--calls", "1x4096"]
    words += ["--drafts", "4", "--draft-layer"]
    args = options(*words, "--caches", str(tmp_path), "--variant", "deterministic_prefix")
    sides = serve_sides.sides_of(args, ["--attention-backend", "KDA"], [])
    assert list(sides) == ["flag", "upstream", "deterministic_prefix"]
    again = options(*sides["deterministic_prefix"])
    assert again.attention_backend == "KDA"
    same = ("config", "parts", "calls", "layers", "heads", "experts", "caches", "variant")
    same += ("drafts", "draft_layer")
    assert {name: getattr(again, name) for name in same} == {n: getattr(args, n) for n in same}
    assert options(*sides["upstream"]).attention_backend is None


def test_upstream_with_the_flags_graphs_is_a_side_without_the_flag(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 2304}')
    words = ["--config", str(tmp_path), "--ranks", "4", "--variant", "upstream_graphs"]
    sides = serve_sides.sides_of(options(*words), ["--attention-backend", "KDA"], [])
    again = options(*sides["upstream_graphs"])
    assert again.attention_backend is None and again.ranks == 4
    arguments = serve_vllm.engine_arguments(again)
    captured = arguments["compilation_config"]["cudagraph_capture_sizes"]
    assert arguments["tensor_parallel_size"] == 4
    assert captured[:51] == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert captured[51] == 640 and captured[-1] == 8192


@pytest.mark.parametrize(("name", "largest"), [("glm_5_3_flash", 5120), ("kimi_k3", 1536)])
def test_upstreams_graphs_follow_from_the_language_model(name: str, largest: int) -> None:
    """Its sizes stand in a part of the configuration."""
    words = ["--config", str(CONFIGS / name), "--ranks", "8", "--variant", "upstream_graphs"]
    arguments = serve_vllm.engine_arguments(options(*words))
    assert arguments["compilation_config"]["cudagraph_capture_sizes"][-1] == largest


def test_a_side_takes_its_caches_and_its_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KDA_DSV4_DETERMINISTIC_PREFIX", *serve_work.cache_folders(tmp_path)):
        monkeypatch.setenv(name, "before")
    words = ["--config", str(tmp_path), "--calls", "1x64"]
    (tmp_path / "config.json").write_text("{}")
    asked = serve_vllm.Asked()
    asked.take(options(*words, "--variant", "deterministic_prefix", "--caches", str(tmp_path)))
    assert asked.calls == [(1, 64)] and asked.turn is None
    assert os.environ["KDA_DSV4_DETERMINISTIC_PREFIX"] == "1"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton_cache_dir")


def test_a_flag_that_did_not_serve_is_a_failure(child: str, tmp_path: Path) -> None:
    sides = {"flag": ["--attention-backend", "KDA"], "upstream": []}
    out = tmp_path / "out.json"
    assert serve_sides.pair(child, sides, out, 60.0, "KDA layers on") == 1
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
    return {"lengths": [1], "together": many, "apart": many}


def test_tokens_of_both_sides_are_compared() -> None:
    resumed = {**greedy([7], 0.5), "resumed": greedy([7], 0.5)["apart"]}
    found = serve_agreement.compared(resumed, resumed, 0.0, eager=resumed)
    names = {name for name, value in found.items() if isinstance(value, dict)}
    assert {"upstream and flag, resumed", "flag and eager, together"} <= names
    same = serve_agreement.compared(greedy([7], 0.5), greedy([7], 0.5), 0.0)
    assert same["upstream and flag, together"]["same"] == serve_agreement.PROMPTS
    other = serve_agreement.compared(greedy([7], 0.5), greedy([8], 0.5), 0.25)
    found = other["upstream and flag, together"]
    assert found["same"] == 0 and found["explained"] == 0
    with pytest.raises(ValueError, match="same prompts"):
        serve_agreement.compared(greedy([7], 0.5), {**greedy([7], 0.5), "lengths": [2]}, 0.0)
    assert serve_agreement.collapse(greedy([7], 0.5))["distinct_tokens"] == 1


def test_rounding_is_what_parts_upstream_from_itself() -> None:
    upstream, flag = greedy([7], 0.25), greedy([8], 0.25)
    assert serve_agreement.rounding([upstream]) == 0.0
    upstream["apart"] = greedy([9], 0.25)["apart"]
    limit = serve_agreement.rounding([greedy([7], 0.5), upstream])  # in any part of the run
    assert limit == 0.5  # 7 was ahead by 0.25, and then 9
    further = greedy([7], 0.75)["together"][:1]
    upstream["together"] = [*upstream["together"][:-1], *further]
    found = serve_agreement.compared(upstream, flag, limit)
    assert found["upstream and flag, together"]["explained"] == serve_agreement.PROMPTS - 1


def test_what_an_engine_compiles_in_its_first_mixed_load_does_not_count() -> None:
    """Planted: 6 s in the middle of the first one."""
    seconds = iter((9.0, 3.0, 3.2))
    found = serve_work.mixed_row(lambda prompts, new_tokens: next(seconds))
    assert found["ms"] == pytest.approx(3100.0) and found["first_ms"] == 9000.0
    assert found["runs_ms"] == [3000.0, 3200.0]


def test_the_memory_of_a_side_is_that_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(query: list[str], **_: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(stdout=f"{100 * int(query[query.index('-i') + 1])}\n")

    monkeypatch.setattr(serve_work.subprocess, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert serve_work.memory_used_mib() == 200
