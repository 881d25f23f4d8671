"""What servers say about themselves, and how requests to them fail."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from backend_cli.errors import BadInputError
from backend_cli.eval import endpoint
from backend_cli.eval.endpoint import Endpoint, Server, ServerGoneError, ask_all


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a server answers by path; ``url`` is its address, ``seen`` the headers it got."""
    monkeypatch.setattr(endpoint, "RETRY_WAITS", (0.0, 0.0))
    monkeypatch.setattr(endpoint, "BUSY_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "m"}]}, "seen": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers["seen"].append(self.headers)
            answer = answers.get(self.path)
            status, body = answer if isinstance(answer, tuple) else (200, answer)
            if isinstance(body, Iterator):  # one answer after another
                status, body = next(body)
            self.send_response(404 if answer is None else status)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    answers["url"] = f"http://127.0.0.1:{server.server_address[1]}"
    yield answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_vllm(pages: dict[str, Any]) -> None:
    pages["/version"] = {"version": "0.26.0"}
    found = Endpoint.parse(f"{pages['url']}/v1").server(None)
    assert found == Server("m", "vllm", "0.26.0", None, None)


@pytest.mark.parametrize("page", ["/server_info", "/get_server_info"])
def test_sglang(pages: dict[str, Any], page: str) -> None:
    pages[page] = {"version": "0.5.23", "attention_backend": "kda", "tp_size": 4, "queue": [1]}
    found = Endpoint.parse(pages["url"]).server("m")
    assert (found.engine, found.version, found.backend) == ("sglang", "0.5.23", "kda")
    assert found.flags == {"version": "0.5.23", "attention_backend": "kda", "tp_size": 4}


def test_a_record_has_no_keys_of_the_server(
    pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang tells whoever may ask its keys, and the command line that it was started with."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-user")
    command = "sglang serve --api-key sk-user --admin-api-key sk-admin --tp 4"
    secrets = {"api_key": "sk-user", "admin_api_key": "sk-admin", "ssl_keyfile_password": "pw"}
    pages["/server_info"] = {"attention_backend": "fa3", "tokenizer_path": "m"} | secrets
    pages["/server_info"] |= {"launch_command": command, "ssl_keyfile": "key.pem"}
    found = Endpoint.parse(pages["url"]).server(None)
    assert found.flags == {
        "attention_backend": "fa3",
        "tokenizer_path": "m",
        "launch_command": "sglang serve --api-key ... --admin-api-key ... --tp 4",
        "ssl_keyfile": "key.pem",
    }


def test_a_server_that_says_nothing(pages: dict[str, Any]) -> None:
    assert Endpoint.parse(pages["url"]).server("m") == Server("m", None, None, None, None)


def test_several_models_need_a_name(pages: dict[str, Any]) -> None:
    pages["/v1/models"] = {"data": [{"id": "a"}, {"id": "b"}]}
    found = Endpoint.parse(pages["url"])
    assert found.server("b").model == "b"
    with pytest.raises(BadInputError, match="--model must be one of a, b, got no --model"):
        found.server(None)


def test_a_key_is_passed_on(pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    Endpoint.parse(pages["url"]).server("m")
    assert pages["seen"][0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("answer", "tries", "error", "message"),
    [
        ({"choices": [{"text": "7"}]}, 1, None, ""),
        ((503, b"loading"), 3, ServerGoneError, "answered 503: loading"),
        ((400, b"too long"), 1, BadInputError, "answered 400: too long"),
        ({"choices": []}, 1, BadInputError, "without choices"),
        ({"choices": [{"text": None}]}, 1, BadInputError, "is not text: None"),
        ((200, b"<html>"), 1, BadInputError, "did not answer with JSON"),
    ],
)
def test_completions(
    pages: dict[str, Any], answer: Any, tries: int, error: Any, message: str
) -> None:
    pages["/v1/completions"] = answer
    found = Endpoint.parse(pages["url"])
    if error is None:
        assert found.complete({"prompt": "x"}) == "7"
    else:
        with pytest.raises(error, match=message):
            found.complete({"prompt": "x"})
    assert len(pages["seen"]) == tries


def test_a_busy_server_is_asked_again(pages: dict[str, Any]) -> None:
    """More often than one that is gone: a limit of requests a minute is no failure."""
    answer = (200, json.dumps({"choices": [{"text": "7"}]}).encode())
    pages["/v1/completions"] = iter([*[(429, b"slow down")] * 5, answer])
    assert Endpoint.parse(pages["url"]).complete({"prompt": "x"}) == "7"
    assert len(pages["seen"]) == 6


def test_a_server_that_stays_busy(pages: dict[str, Any]) -> None:
    pages["/v1/completions"] = (429, b"slow down")
    begin = time.monotonic()
    with pytest.raises(ServerGoneError, match="answered 429: slow down"):
        Endpoint.parse(pages["url"], timeout=0.5).complete({"prompt": "x"})
    assert time.monotonic() - begin < 5 and len(pages["seen"]) > 1


def test_an_interrupt_does_not_wait_for_answers() -> None:
    answered, over = threading.Event(), threading.Event()
    timer = threading.Timer(20, over.set)
    timer.start()

    def ask(prompt: str) -> str:
        if prompt != "first":
            over.wait()
        return prompt

    def done(index: int, answer: str) -> None:
        answered.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_all(ask, ["first", "slow", "slow"], 3, done)
    assert answered.is_set() and not over.is_set()
    over.set()
    timer.cancel()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_answers_under_way_are_not_lost(concurrency: int) -> None:
    asked: list[str] = []
    done: dict[int, str] = {}

    def ask(prompt: str) -> str:
        asked.append(prompt)
        if prompt == "p4":
            raise ServerGoneError("gone")
        return prompt.upper()

    prompts = [f"p{n}" for n in range(20)]
    with pytest.raises(ServerGoneError, match="gone"):
        ask_all(ask, prompts, concurrency, done.__setitem__)
    assert len(asked) < 20
    assert done == {prompts.index(p): p.upper() for p in asked if p != "p4"}


@pytest.mark.parametrize("url", ["http://[::1", "http://host:99999", "http://host:x", "http://:0"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(BadInputError, match="--base-url must be like http://localhost:8000, got"):
        Endpoint.parse(url)


@pytest.mark.parametrize("names", [[{"id": 1}], [{"id": "a"}, {"id": None}]])
def test_models_without_names(pages: dict[str, Any], names: list[dict[str, Any]]) -> None:
    pages["/v1/models"] = {"data": names}
    with pytest.raises(BadInputError, match="is not an OpenAI-compatible endpoint"):
        Endpoint.parse(pages["url"]).server(None)


def test_a_server_without_models(pages: dict[str, Any]) -> None:
    pages["/v1/models"] = {"data": []}
    with pytest.raises(BadInputError, match=r"http://127\.0\.0\.1:\d+ serves no model"):
        Endpoint.parse(pages["url"]).server(None)


@pytest.mark.parametrize("key", ["secret\r", "secret\nmore", "s\u00e9cret"])
def test_a_key_that_no_header_can_have_is_not_shown(
    pages: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file with the line ends of Windows."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(BadInputError, match="OPENAI_API_KEY must be printable ASCII") as caught:
        Endpoint.parse(pages["url"]).server(None)
    assert "cret" not in str(caught.value) and not pages["seen"]


class Raw(socketserver.StreamRequestHandler):
    """Answers ``server.said``, then ends the connection, or falls silent."""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(self.server.said)  # type: ignore[attr-defined]
        self.wfile.flush()
        self.server.over.wait()  # type: ignore[attr-defined]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nhalf",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\nhalf",
        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"data": [',
    ],
)
def test_a_server_that_ends_in_the_middle_of_an_answer_is_gone(said: bytes, silent: bool) -> None:
    """So that a completion is asked for again."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Raw) as server:
        server.said, server.over = said, threading.Event()  # type: ignore[attr-defined]
        if not silent:
            server.over.set()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(ServerGoneError):
                Endpoint.parse(f"http://127.0.0.1:{server.server_address[1]}", 0.5).server(None)
        finally:
            server.over.set()  # type: ignore[attr-defined]
            server.shutdown()
