"""What servers say about themselves, and how requests to them fail."""

from __future__ import annotations

import socketserver
import threading
import time
from typing import Any

import pytest

from backend_cli.errors import BadInputError
from backend_cli.eval.endpoint import Endpoint, Server, ask_all
from backend_core.bounded import ANSWER_BYTES


def test_vllm(pages: dict[str, Any]) -> None:
    pages["/version"] = {"version": "0.26.0"}
    found = Endpoint.parse(f"{pages['url']}/v1").server(None)
    assert found == Server("m", "vllm", "0.26.0", None)


@pytest.mark.parametrize("page", ["/server_info", "/get_server_info"])
def test_sglang(pages: dict[str, Any], page: str) -> None:
    pages[page] = {"version": "0.5.23", "attention_backend": "kda", "tp_size": 4, "queue": [1]}
    found = Endpoint.parse(pages["url"]).server("m")
    assert (found.engine, found.version, found.backend) == ("sglang", "0.5.23", "kda")


def test_a_server_that_says_nothing(pages: dict[str, Any]) -> None:
    assert Endpoint.parse(pages["url"]).server("m") == Server("m", None, None, None)


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
    ("answer", "message"),
    [
        ((503, b"loading"), "answered 503: loading"),
        ({"choices": None}, "without choices"),
        ({"object": "error", "message": "too long"}, "with an error: too long"),
        ({"choices": [{"text": 3}]}, "whose text is of type int"),
        ((422, b'{"detail": [{"msg": "no prompt"}]}'), "answered 422: .*no prompt"),
        ((200, b"\xff"), "did not answer with JSON"),
        ((200, b"[" * 100_000), "not nested so deeply"),
        ((200, b'"' + b"x" * (ANSWER_BYTES + 1) + b'"'), "expected an answer of at most"),
    ],
    ids=[
        *("status", "null", "an old error", "a number", "detail", "not UTF-8", "deep", "large"),
    ],
)
def test_a_completion_without_text(pages: dict[str, Any], answer: Any, message: str) -> None:
    pages["/v1/completions"] = answer
    with pytest.raises(BadInputError, match=message):
        Endpoint.parse(pages["url"]).complete({"prompt": "x"})


def test_a_server_cannot_send_the_key_elsewhere(
    pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    pages["/v1/models"] = (302, b"")
    with pytest.raises(BadInputError, match=r"answered 302: a redirect to http://127\.0.*/taken"):
        Endpoint.parse(pages["url"]).server("m")
    assert pages["paths"] == ["/v1/models"]


def test_an_error_ends_the_asking() -> None:
    asked: list[str] = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        time.sleep(0.01)
        if prompt == "p4":
            raise BadInputError("gone")
        return prompt.upper()

    with pytest.raises(BadInputError, match="gone"):
        list(ask_all(ask, [f"p{n}" for n in range(500)], 3))
    assert len(asked) < 500
    assert dict(ask_all(ask, ["a", "b", "c"], 2)) == {0: "A", 1: "B", 2: "C"}


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


def test_a_server_that_ends_in_the_middle_of_an_answer() -> None:
    class Half(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"data": [')

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Half) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            with pytest.raises(BadInputError, match="no answer from a server"):
                Endpoint.parse(f"http://127.0.0.1:{server.server_address[1]}").server(None)
        finally:
            server.shutdown()
