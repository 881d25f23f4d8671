"""``eval`` end to end: a real server, a real model, the real harness; and every way it can fail."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from backend_cli.eval import endpoint
from backend_cli.eval import gsm8k as eval_gsm8k
from backend_cli.eval import recall as eval_recall
from backend_cli.eval import recall_task as recall
from kda_backend.engines import transformers as kda
from tests.cli.program import TEN, assert_one_sentence, run
from tests.recall_canary import with_transposed_state

if TYPE_CHECKING:
    from tests.cli.server import Server

RECALL = eval_recall.RECALL

pytestmark = pytest.mark.usefixtures("in_a_new_folder")


@pytest.fixture(scope="module")
def model() -> Iterator[object]:
    found = kda.load_model(RECALL / "checkpoint", torch.device("cpu"))
    kda.enable()
    yield found
    kda.disable()


@pytest.fixture
def server(model: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    from tests.cli.server import Server

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    found = Server(model)
    yield found
    found.close()


def ask_gsm8k(server: Server, *more: str) -> tuple[int, str, str]:
    pytest.importorskip("lm_eval")
    return run(
        *("eval", "gsm8k", "--base-url", server.base_url, "--data-path", str(TEN)),
        *("--max-tokens", "16", *more),
    )


def ask_recall(server: Server, count: int, *more: str) -> tuple[int, str, str]:
    return run(
        *("eval", "recall", "--base-url", f"{server.base_url}/v1/"),
        *("--num-questions", str(count), *more),
    )


def test_recall_through_a_server(server: Server) -> None:
    code, out, _ = ask_recall(server, 6)
    assert code == 0, out
    record = json.loads(Path("recall-recall.json").read_text())
    assert record["accuracy"]["exact"]["value"] == 1.0 and record["verdict"]["ok"] is True
    assert (record["engine"], record["engine_version"]) == ("transformers", "5.17.0")
    assert record["model"] == "recall" and len(record["questions"]) == 6
    questions = recall.read_questions(RECALL / "questions.jsonl")
    assert {body["prompt"] for body in server.requests} == {
        questions.prompt(item) for item in questions.items[:6]
    }
    assert "exact      1.0000, 95 % interval 0.6097 to 1.0000" in out


def test_recall_sees_a_state_that_is_read_transposed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    name = "chunk_kimi_delta_attention"
    monkeypatch.setattr(modeling, name, with_transposed_state(getattr(modeling, name)))
    code, out, _ = ask_recall(server, 8)
    assert code == 1 and "under 0.95" in out
    record = json.loads(Path("recall-recall.json").read_text())
    assert record["accuracy"]["exact"]["value"] < 0.5


def test_recall_with_transformers_here_and_a_comparison() -> None:
    for name, more in (("upstream", ["--upstream"]), ("kda", [])):
        code, out, _ = run(
            "eval", "recall", "--num-questions", "3", "--output", f"{name}.json", *more
        )
        assert code == 0, out
        assert json.loads(Path(f"{name}.json").read_text())["backend"] == name
    assert not kda.is_enabled()
    code, out, _ = run("eval", "compare", "upstream.json", "kda.json", "--json", "difference.json")
    assert code == 0 and "the runs do not differ beyond chance (exact McNemar, p = 1)" in out
    assert json.loads(Path("difference.json").read_text())["questions"] == 3


def drawn_answer(body: dict[str, Any]) -> str:
    """In the place of the model's, which takes seconds over the harness's long prompts."""
    return f" From {len(body['prompt'])} that leaves 1,{zlib.crc32(body['prompt'].encode())}."


def test_gsm8k_through_a_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_complete", drawn_answer)
    code, _, err = ask_gsm8k(server, "--flags", "--attention-backend KDA")
    assert code == 0, err
    record = json.loads(Path("gsm8k-recall.json").read_text())
    assert record["flags"] == "--attention-backend KDA"
    assert record["verdict"] == {"ok": None, "text": "no published value for recall"}
    assert [q["expected"] for q in record["questions"]][:3] == ["24", "8", "50"]
    assert len(server.requests) == 10
    for body, question in zip(
        sorted(server.requests, key=lambda b: _asked(b["prompt"])),
        sorted(record["questions"], key=lambda q: q["question"]),
        strict=True,
    ):
        # five examples, none of them the question itself, then the question
        assert body["prompt"].count("Question: ") == 6 and body["prompt"].count("#### ") == 5
        assert _asked(body["prompt"])[:80] == question["question"]
        assert body["prompt"].count(question["question"]) == 1
        assert (body["max_tokens"], body["temperature"]) == (16, 0.0)
        assert "Question:" in body["stop"]
        # the harness's rules, applied by hand
        numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", question["answer"])
        assert question["extracted"]["flexible"] == (numbers[-1] if numbers else "[invalid]")
    for rule in ("flexible", "strict"):
        share = sum(q["right"][rule] for q in record["questions"]) / 10
        assert record["accuracy"][rule]["value"] == pytest.approx(share)


def _asked(prompt: str) -> str:
    return prompt.split("Question: ")[-1].removesuffix("\nAnswer:")


def test_right_answers_are_scored_right(capfd: pytest.CaptureFixture[str]) -> None:
    """The harness's scoring, with answers instead of a server."""
    pytest.importorskip("lm_eval")
    lines = [json.loads(line) for line in TEN.read_text().splitlines()]
    answers = {line["question"]: f" {line['answer']}\n" for line in lines}
    answers[lines[0]["question"]] = " That makes 24 jars."  # no ####: the flexible rule alone
    answers[lines[1]["question"]] = " 15 - 7 = 9\n#### 9"
    prompts_seen = []

    def ask(prompts: list[str], options: dict[str, Any]) -> list[str]:
        assert options["temperature"] == 0.0 and "Question:" in options["until"]
        prompts_seen.extend(prompts)
        return [answers[_asked(prompt)] for prompt in prompts]

    file = Path("ten [1]*.jsonl").resolve()  # a name, and no pattern
    file.write_text(TEN.read_text())
    files = {"test": str(file), "train": str(file)}
    results = eval_gsm8k.evaluate(ask, files, 9)
    questions = eval_gsm8k._questions(results["samples"]["gsm8k"])
    assert len(prompts_seen) == len(questions) == 9
    assert [q["right"]["flexible"] for q in questions] == [True, False, *[True] * 7]
    assert [q["right"]["strict"] for q in questions] == [False, False, *[True] * 7]
    assert "fatal: not a git repository" not in capfd.readouterr().err


@pytest.mark.parametrize("concurrency", ["1", "2"])
def test_a_server_that_stops_half_way(
    concurrency: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered is not asked again."""
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", (0.0,))
    monkeypatch.setattr(server, "_complete", drawn_answer)
    server.answers_left = 4
    code, out, err = ask_gsm8k(server, "--output", "new/run.json", "--concurrency", concurrency)
    assert (code, out) == (2, "")
    kept = Path("new/run.json.answers")
    assert f"the answers are kept in {kept}" in err.splitlines()[-1] and kept.exists()
    assert not Path("new/run.json").exists()
    first = {body["prompt"] for body in server.requests[:4]}
    server.answers_left = None
    server.restart()
    code, out, err = ask_gsm8k(server, "--output", "new/run.json")
    assert code == 0, err
    again = {body["prompt"] for body in server.requests}
    # answers under way when the first request was given up are asked again
    assert len(again) == len(server.requests) == 6 + len(first & again) < 10
    assert len(json.loads(Path("new/run.json").read_text())["questions"]) == 10
    assert not kept.exists()


def test_a_record_is_not_overwritten(server: Server) -> None:
    Path("recall-recall.json").write_text("mine")
    code, out, err = ask_recall(server, 1)
    assert (code, out) == (2, "") and "recall-recall.json exists already" in err
    assert Path("recall-recall.json").read_text() == "mine" and not server.requests


def bad_files(tmp_path: Path) -> dict[str, Path]:
    names = ("binary", "other", "few", "folder", "half")
    files = {name: tmp_path / name for name in names}
    files["binary"].write_bytes(b"\xff\xfe\x00")
    files["other"].write_text('{"prompt": "x"}\n')
    files["few"].write_text("".join(TEN.read_text().splitlines(keepends=True)[:3]))
    files["folder"].mkdir()
    files["half"].write_text('{"question": "\\ud83d", "answer": "1 #### 1"}\n')
    return files | {"absent": tmp_path / "absent"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "cannot read data .*absent: No such file"),
        ("folder", "cannot read data .*folder: Is a directory"),
        ("binary", "binary must be UTF-8 text"),
        ("other", "other, line 1: expected a GSM8K record"),
        ("few", "few must have at least 6 questions, got 3"),
        ("half", "half, line 1: expected a GSM8K record"),  # of a character
    ],
)
def test_unusable_data(name: str, message: str, tmp_path: Path) -> None:
    file = bad_files(tmp_path)[name]
    code, out, err = run(
        "eval", "gsm8k", "--base-url", "http://127.0.0.1:9", "--data-path", str(file)
    )
    assert (code, out) == (2, "") and re.search(message, err), err
    assert_one_sentence(err)
    if name in ("absent", "folder", "binary", "other"):
        code, _, err = run("eval", "recall", "--data-path", str(file))
        assert code == 2
        assert_one_sentence(err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "no answer from a server at http://127.0.0.1:9: "),
        (["--base-url", "localhost:8000"], "--base-url must be like http://localhost:8000"),
        (["--base-url", "http://x", "--num-questions", "999"], "--num-questions must be at most"),
        (["--base-url", "http://x", "--num-questions", "0"], "Invalid value for '--num-questions'"),
        (["--base-url", "http://x", "--upstream"], "--upstream and --checkpoint are for"),
        (["--model", "kimi"], "--model is the name at a server and must come with --base-url"),
        (["--checkpoint", "nowhere"], "the checkpoint must be a folder with config.json"),
    ],
)
def test_bad_arguments(args: list[str], message: str) -> None:
    code, out, err = run("eval", "recall", *args)
    assert (code, out) == (2, "") and message in err
    assert_one_sentence(err)
    assert not list(Path().glob("*.json*"))


def test_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    find = eval_gsm8k.importlib.util.find_spec
    monkeypatch.setattr(
        eval_gsm8k.importlib.util, "find_spec", lambda n: None if n == "lm_eval" else find(n)
    )
    code, _, err = run("eval", "gsm8k", "--base-url", "http://127.0.0.1:9")
    assert (code, err) == (
        1,
        "kda-dsv4: eval gsm8k needs lm-eval[api]: pip install '.[eval]' in the clone\n",
    )
