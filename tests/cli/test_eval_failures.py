"""What ``eval`` does with servers that fail: retries, what is kept of a run, and what is shown."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend_cli.errors import BadInputError
from backend_cli.eval import endpoint
from tests.cli.program import TEN, run

KEY = "sk-SECRET-123"
_FROM_HERE = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

pytestmark = pytest.mark.usefixtures("in_a_new_folder")


def recall(url: str, *more: str) -> tuple[int, str, str]:
    return run("eval", "recall", "--base-url", url, "--num-questions", "8", *more)


def gsm8k(url: str, *more: str) -> tuple[int, str, str]:
    pytest.importorskip("lm_eval")
    return run("eval", "gsm8k", "--base-url", url, "--data-path", str(TEN), *more)


def counted(answer: Callable[[int], Any]) -> Callable[[Any], Any]:
    """``answer(n)`` for the n-th request, from 1 on; the server's threads take turns in Python."""
    numbers = iter(range(1, 10_000))
    return lambda body: answer(next(numbers))


def text(said: str | None) -> dict[str, Any]:
    return {"choices": [{"text": said}]}


@pytest.mark.parametrize(
    ("ask", "status"), [*((recall, status) for status in (429, 500, 502, 503, 504)), (gsm8k, 503)]
)
def test_a_failure_that_passes_is_tried_again(
    pages: dict[str, Any], ask: Callable[..., tuple[int, str, str]], status: int
) -> None:
    pages["/v1/completions"] = counted(lambda n: (status, b"") if n in (3, 4) else text("x"))
    code, out, err = ask(pages["url"])
    assert code in (0, 1) and "record: " in out, err
    (record,) = Path().glob("*.json")
    assert all(q["answer"] == "x" for q in json.loads(record.read_text())["questions"])


def test_a_failure_that_stays_ends_the_run_and_keeps_its_answers(pages: dict[str, Any]) -> None:
    pages["/v1/completions"] = counted(lambda n: text("x") if n <= 5 else (502, b"gone"))
    code, out, err = recall(pages["url"], "--concurrency", "1")
    assert (code, out) == (2, "") and "/v1/completions answered 502: gone; the answers are" in err
    assert "kept in recall-m.json.answers: run the same command again to go on" in err
    # a request that fails is sent four times; meanwhile one more may have begun
    assert pages["paths"].count("/v1/completions") in (5 + 4, 5 + 4 + 4)
    pages["paths"].clear()
    pages["/v1/completions"] = text("y")
    code, _, err = recall(pages["url"])
    record = json.loads(Path("recall-m.json").read_text())
    assert [q["answer"] for q in record["questions"]] == ["x"] * 5 + ["y"] * 3, err
    assert pages["paths"].count("/v1/completions") == 3
    assert not Path("recall-m.json.answers").exists()


@pytest.mark.parametrize(
    "change",
    ["engine", "backend", "weights", "model", "flags", "max-tokens"],
)
def test_answers_of_another_server_or_option_are_not_used(
    pages: dict[str, Any], change: str
) -> None:
    models = {"data": [{"id": "m", "root": "/a"}, {"id": "n", "root": "/a"}]}
    info = {"version": "1", "attention_backend": "a"}
    pages |= {"/v1/models": models, "/server_info": info}
    pages["/v1/completions"] = counted(lambda n: text("old") if n <= 6 else (400, b"no"))
    run_ = (pages["url"], "--output", "run.json")
    ask = gsm8k if change == "max-tokens" else recall  # which has no such option
    code, _, err = ask(*run_, "--model", "m", "--concurrency", "2")
    assert code == 2 and "answered 400: no; the answers are kept in run.json.answers" in err
    model, more = "m", ()
    if change == "engine":
        info["version"] = "2"
    elif change == "backend":
        info["attention_backend"] = "b"
    elif change == "weights":
        models["data"][0]["root"] = "/b"
    elif change == "model":
        model = "n"
    else:
        more = (f"--{change}", "9")
    pages["/v1/completions"] = text("#### -1")
    code, _, err = ask(*run_, "--model", model, *more)
    record = json.loads(Path("run.json").read_text())
    assert {q["answer"] for q in record["questions"]} == {"#### -1"}
    if change != "max-tokens":  # another request, and the same server
        assert "the answers in run.json.answers are of another run and are not used: " in err


def test_a_file_that_holds_no_answers_is_left_alone(pages: dict[str, Any]) -> None:
    kept = Path("recall-m.json.answers")
    for content in ("mine\n", "{}\n", '{"format": "x"}\n'):
        kept.write_text(content)
        code, out, err = recall(pages["url"])
        assert (code, out) == (2, "") and "must hold answers that eval kept" in err
        assert kept.read_text() == content


def test_a_token_in_place_of_a_user_is_not_shown(pages: dict[str, Any]) -> None:
    pages["/v1/completions"] = (401, b"unknown: tok3n")
    code, _, err = recall(pages["url"].replace("http://", "http://tok3n@"))
    assert code == 2 and "answered 401: unknown: ***" in err


@pytest.mark.parametrize("proxy", ["http://me:SECRET", "http:/me:SECRET@host"])
def test_a_proxy_that_is_no_address_is_not_shown(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = urllib.request.ProxyHandler({"http": proxy})
    monkeypatch.setattr(endpoint, "_OPENER", urllib.request.build_opener(handler))
    monkeypatch.setenv("no_proxy", "")
    code, _, err = recall("http://host:8000")
    assert code == 2 and "or the proxy of http_proxy or https_proxy, is no address" in err
    assert "SECRET" not in err


def test_an_error_that_drips_does_not_hold_the_command() -> None:
    class Drip(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"HTTP/1.1 418 Drip\r\n\r\n")
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.02)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        begin = time.monotonic()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(BadInputError, match="answered 418"):
            endpoint.Endpoint.parse(url, 0.3).server(None)
        assert time.monotonic() - begin < 3
        server.shutdown()


def test_half_a_line_on_a_full_disk(pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before stays readable, and so does what comes after."""
    pages["/v1/completions"] = text("x")
    find, full = Path.open, [False, True, False]

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self._file.close()

        def write(self, content: bytes) -> int:
            return int(self._file.write(content[: len(content) // 2]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    def opened(path: Path, *of: Any, **named: Any) -> Any:
        file = find(path, *of, **named)
        if path.suffix != ".answers" or not (full and full.pop(0)):
            return file
        return Full(file)

    monkeypatch.setattr(Path, "open", opened)
    code, _, err = recall(pages["url"], "--concurrency", "1")
    assert code == 2 and "cannot write recall-m.json.answers: No space left on device" in err
    kept = len(Path("recall-m.json.answers").read_text().splitlines()) - 1  # and the header
    pages["paths"].clear()
    assert kept >= 1 and recall(pages["url"])[0] == 1
    assert pages["paths"].count("/v1/completions") == 8 - kept


def test_a_begin_of_the_first_line_is_no_answer(pages: dict[str, Any]) -> None:
    pages["/v1/completions"] = counted(lambda n: text("x") if n <= 1 else (400, b""))
    recall(pages["url"], "--concurrency", "1")
    kept = Path("recall-m.json.answers")
    kept.write_text(kept.read_text()[:40])
    pages["/v1/completions"] = text("z")
    code, _, err = recall(pages["url"])
    assert code == 1 and "must hold answers" not in err


def test_an_answer_that_was_cut_off_is_asked_again(pages: dict[str, Any]) -> None:
    pages["/v1/completions"] = counted(lambda n: text("x") if n <= 5 else (400, b""))
    assert recall(pages["url"], "--concurrency", "1")[0] == 2
    kept = Path("recall-m.json.answers")
    kept.write_text(kept.read_text()[:-10])
    pages["/v1/completions"] = counted(lambda n: text("y") if n <= 3 else (400, b""))
    assert recall(pages["url"], "--concurrency", "1")[0] == 2
    pages["/v1/completions"] = text("z")
    recall(pages["url"])
    record = json.loads(Path("recall-m.json").read_text())
    assert [q["answer"] for q in record["questions"]] == ["x"] * 4 + ["y"] * 3 + ["z"]


@pytest.mark.parametrize("ask", [recall, gsm8k])
def test_null_for_a_text_is_counted(
    pages: dict[str, Any], ask: Callable[..., tuple[int, str, str]]
) -> None:
    pages["/v1/completions"] = counted(lambda n: text(None if n <= 2 else "x"))
    _, out, err = ask(pages["url"])
    assert "2 answers had null for a text and count as wrong" in out, err
    (record,) = Path().glob("*.json")
    assert json.loads(record.read_text())["without_text"] == 2


@pytest.mark.parametrize("ask", [recall, gsm8k])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"error": {"message": "Insufficient balance", "code": 402}}, "Insufficient balance"),
        ((400, b'{"error": {"message": "at most 512 tokens"}}'), "at most 512 tokens"),
        ((401, f"wrong key {KEY} in Bearer {KEY}".encode()), "wrong key *** in Bearer ***"),
        ((400, b"x" * 990 + KEY.encode()), "x***"),
        ({"error": {"message": "x" * 980 + KEY}}, "x***"),
        ((400, b" " * (65_536 - 11) + KEY.encode()), "answered 400:"),
        (
            (500, f"{{'Authorization': 'Bearer {KEY[:9]}'}}".encode()),
            "'Authorization': 'Bearer ***'",
        ),
        ({"choices": []}, "without choices[0].text"),
        ([], "without choices[0].text"),
        ((200, f"not JSON {KEY}".encode()), "did not answer with JSON"),
    ],
)
def test_the_reason_is_shown_and_the_key_is_not(
    pages: dict[str, Any],
    ask: Callable[..., tuple[int, str, str]],
    answer: Any,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    pages["/v1/completions"] = answer
    code, out, err = ask(pages["url"])
    assert (code, out) == (2, "") and reason in err and "SECRET" not in err
    assert pages["seen"][-1]["Authorization"] == f"Bearer {KEY}"
    assert err.splitlines()[-1].startswith("kda-dsv4: ")


def test_a_password_in_the_address_is_sent_and_not_shown(
    pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    url = pages["url"].replace("http://", "http://me:pass%2Fword@")
    said = b"pass/word is not me's, bWU6cGFzcy93b3Jk neither, nor pass%2Fword"
    pages["/v1/completions"] = (403, said)
    code, out, err = recall(url)
    assert (code, out) == (2, "") and "*** is not me's, *** neither, nor ***" in err
    assert "word" not in err and pages["seen"][-1]["Authorization"] == "Basic bWU6cGFzcy93b3Jk"
    pages["/v1/completions"] = counted(lambda n: text("x") if n < 4 else (403, b""))
    recall(url, "--concurrency", "1")
    assert "word" not in Path("recall-m.json.answers").read_text()


@pytest.mark.parametrize(
    "url",
    [
        "http://me:SECRET@host:99999",
        "me:SECRET@host",
        "http://me:SEC/RET@host:x",
        "http://host?key=SECRET",
        "http://me:SECRET@127.0.0.1:9",
    ],
)
def test_an_address_that_cannot_be_used_shows_no_password(url: str) -> None:
    code, out, err = recall(url)
    assert (code, out) == (2, "") and "RET" not in err and "SEC" not in err


def test_a_server_that_calls_itself_by_the_key(
    pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    pages |= {"/v1/models": {"data": [{"id": f"m-{KEY}"}]}, "/version": {"version": KEY}}
    pages["/v1/completions"] = text(f"Bearer {KEY}")
    for name in ("a.json", "b.json"):
        code, out, err = recall(pages["url"], "--output", name)
        assert code == 1 and "m-*** on vllm ***" in out and "SECRET" not in out + err
    pages["/v1/completions"] = text("other")
    recall(pages["url"], "--output", "c.json")
    assert "SECRET" not in "".join(map(str, run("eval", "compare", "a.json", "c.json")))
    code, out, err = recall(pages["url"], "--model", "n")
    assert code == 2 and "--model must be one of m-***" in err


def test_an_interrupt_waits_for_no_answer(pages: dict[str, Any]) -> None:
    """Of servers whose answers take minutes; the exit code is that of any interrupt."""
    asked, ended = threading.Event(), threading.Event()

    def late(body: Any) -> Any:
        asked.set()
        ended.wait(60)
        return text("x")

    pages["/v1/completions"] = late
    command = ("eval", "recall", "--base-url", pages["url"], "--num-questions", "3")
    process = subprocess.Popen(
        [sys.executable, "-m", "backend_cli.main", *command],
        env=_FROM_HERE,
        # a shell's job in the background, such as these tests may be, ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        ended.set()
        process.kill()
        process.wait()


def test_a_folder_that_the_harness_cannot_use_is_named(
    pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    config = pytest.importorskip("datasets.config")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", "/proc/of-nobody")
    code, out, err = gsm8k(pages["url"])
    assert (code, out) == (2, "")
    assert "kda-dsv4: the data cannot be prepared: " in err and "/proc/of-nobody" in err
