"""An OpenAI-compatible completions endpoint, asked with the standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from backend_cli.errors import BadInputError
from backend_cli.terminal import hidden
from backend_core.bounded import ANSWER_BYTES, parse_json, read_answer

Question = TypeVar("Question")
Answer = TypeVar("Answer")

RETRY_SECONDS = (1.0, 4.0, 16.0)
"""Before each further try of a completion that failed as a server that is busy or restarts does."""
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_ERROR_BYTES, _ERROR_CHARS, _SECRET_BYTES = 1 << 16, 1000, 4096


@dataclass(frozen=True)
class Server:
    """A server's description of itself.

    Attributes:
        model: the served name that requests give.
        engine, version: ``"vllm"``, ``"0.26.0"``; ``None`` where it does not say.
        backend: the attention backend, ``None`` where it does not say (vLLM never does).
        root: the weights behind the name, ``None`` where it does not say.
    """

    model: str
    engine: str | None
    version: str | None
    backend: str | None
    root: str | None = None


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, and how long one answer may take.

    Attributes:
        base_url: without user, password and a final ``/v1``.
        login: ``user:password`` of the address; it takes the place of ``OPENAI_API_KEY``.
    """

    base_url: str
    timeout: float = 600.0
    login: str | None = field(default=None, repr=False)

    @staticmethod
    def parse(base_url: str, timeout: float = 600.0) -> Endpoint:
        """Accept ``http://host:port`` with or without a final ``/`` or ``/v1``.

        Raises:
            BadInputError: it is no such URL.
        """
        url = base_url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(url)
            known = (
                parts.scheme in ("http", "https")
                and bool(parts.hostname)
                and parts.port != 0
                and not parts.query
                and not parts.fragment
            )
        except ValueError:  # unbalanced brackets, or an invalid port
            known = False
        if not known or not url.isprintable() or " " in url:
            shown = re.sub(r"^.*@", "***@", re.split("[?#]", hidden(base_url))[0])
            raise BadInputError(f"--base-url must be like http://localhost:8000, got {shown!r}")
        login, at, host = parts.netloc.rpartition("@")
        url = parts._replace(netloc=host).geturl()
        return Endpoint(url, timeout, unquote(login) if at else None)

    def server(self, model: str | None) -> Server:
        """The server there; ``model`` picks one of several, by default the only one.

        Raises:
            BadInputError: nothing answers, or no such endpoint, or it does not serve this model.
        """
        try:
            entries = {entry["id"]: entry for entry in self._get("/v1/models")["data"]}
            served = list(entries)
            if not all(isinstance(name, str) for name in served):
                raise TypeError("a name that is not text")
        except (KeyError, TypeError, NotThereError) as error:
            raise BadInputError(f"{self.base_url} is not an OpenAI-compatible endpoint") from error
        if not served:
            raise BadInputError(f"{self.base_url} serves no model")
        if model is None and len(served) == 1:
            model = served[0]
        if model is None or model not in served:
            got = "no --model" if model is None else repr(model)
            names = self._hidden(", ".join(served))
            raise BadInputError(f"--model must be one of {names}, got {got}")
        root = entries[model].get("root")
        root = root if isinstance(root, str) else None
        info = self._try_get("/server_info") or self._try_get("/get_server_info")
        if isinstance(info, dict) and "attention_backend" in info:
            backend = info["attention_backend"]
            return Server(model, "sglang", info.get("version"), backend, root)
        version = self._try_get("/version")
        if isinstance(version, dict) and isinstance(version.get("version"), str):
            engine = str(version.get("engine", "vllm"))
            return Server(model, engine, version["version"], version.get("backend"), root)
        return Server(model, None, None, None, root)

    def complete(self, request: dict[str, Any]) -> str | None:
        """The text of one completion, ``None`` where the server answers with null.

        A request that fails as one to a busy or restarting server does is tried again,
        `RETRY_SECONDS` apart.

        Raises:
            BadInputError: the server does not answer, or refuses the request.
        """
        for wait in RETRY_SECONDS:
            try:
                return self._complete(request)
            except PassingError:
                time.sleep(wait)
        return self._complete(request)

    def _complete(self, request: dict[str, Any]) -> str | None:
        answer = self._send("/v1/completions", request)
        try:
            text = answer["choices"][0]["text"]
        except (KeyError, IndexError, TypeError) as error:
            said = _reason(answer) if isinstance(answer, dict) else None
            what = "without choices[0].text" if said is None else f"with an error: {said}"
            raise BadInputError(
                f"{self.base_url} answered a completion {self._hidden(what)}"
            ) from error
        if text is not None and not isinstance(text, str):
            raise BadInputError(
                f"{self.base_url} answered a completion whose text is of type "
                f"{type(text).__name__}, expected str"
            )
        return text

    def _get(self, path: str) -> Any:
        return self._send(path, None)

    def _try_get(self, path: str) -> Any:
        try:
            return self._get(path)
        except BadInputError:
            return None

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, self._headers())
        try:
            with self._open(request) as response:
                answer = read_answer(response, ANSWER_BYTES, self.timeout)
                if response.length:  # bytes that were promised: the server ended meanwhile
                    raise http.client.IncompleteRead(answer, response.length)
                return parse_json(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404 and body is None:
                raise NotThereError(f"{self.base_url} has no {path}") from None
            kind = PassingError if error.code in _PASSING else BadInputError
            said = self._hidden(_said(_begin_of(error, self.timeout)))
            if 300 <= error.code < 400:
                where = self._hidden(error.headers.get("Location", "nowhere"))
                said = f"a redirect to {where}, to which nothing is sent unless --base-url names it"
            raise kind(f"{self.base_url}{path} answered {error.code}: {said}") from None
        except ValueError as error:
            said = self._hidden(str(error))
            raise BadInputError(f"{self.base_url}{path} did not answer with JSON: {said}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = self._hidden(str(getattr(error, "reason", None) or error))
            raise PassingError(f"no answer from a server at {self.base_url}: {reason}") from None

    def _open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        try:
            response: http.client.HTTPResponse = _OPENER.open(request, timeout=self.timeout)
        except (ValueError, http.client.InvalidURL):  # the text may have a proxy's password
            raise BadInputError(
                f"{self.base_url} cannot be asked: it, or the proxy of http_proxy or https_proxy,"
                " is no address"
            ) from None
        return response

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.login is not None:
            coded = base64.b64encode(self.login.encode()).decode()
            headers["Authorization"] = f"Basic {coded}"
        elif key := os.environ.get("OPENAI_API_KEY"):
            if not (key.isascii() and key.isprintable()):  # the error about a header would show it
                raise BadInputError(
                    "OPENAI_API_KEY must be printable ASCII: it may end as a line of a file does"
                )
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _hidden(self, text: str) -> str:
        """Text of the server, in one line of bounded length, without the secrets that only this
        side may know. A user without a password is one."""
        login = self.login or ""
        user, _, password = login.partition(":")
        secret = password or user
        coded = base64.b64encode(login.encode()).decode()
        shown = hidden(text, secret, quote(secret), quote(secret, safe=""), coded)
        return " ".join(shown.split())[:_ERROR_CHARS]


def _begin_of(error: urllib.error.HTTPError, seconds: float) -> bytes:
    """The begin of an error's answer, as far as the server sends it within ``seconds``."""
    deadline, body = time.monotonic() + seconds, b""
    try:
        while len(body) < _ERROR_BYTES and time.monotonic() < deadline:
            if not (part := error.read1(_ERROR_BYTES)):
                return body
            body += part
    except (OSError, http.client.HTTPException):
        return body
    return body[:-_SECRET_BYTES]  # where it is cut a secret may be


def _said(body: bytes) -> str:
    """An error's sentence, or its text where that has none."""
    try:
        said = _reason(json.loads(body))
    except (ValueError, RecursionError):
        said = None
    return said or body.decode(errors="replace")


def _reason(answer: Any) -> str | None:
    """The sentence in an error's JSON: ``error.message``, ``message`` or ``detail``."""
    while isinstance(answer, dict):
        answer = next(
            (answer[key] for key in ("error", "message", "detail") if answer.get(key)), None
        )
    return None if answer is None else str(answer)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for the server that the user named, and for no other that it names."""

    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class NotThereError(BadInputError):
    """The server answers, but has no such page."""


class PassingError(BadInputError):
    """A failure that the same request may not meet again."""


def ask_all(
    ask: Callable[[Question], Answer], prompts: Sequence[Question], concurrency: int
) -> Iterator[tuple[int, Answer]]:
    """Ask every prompt, ``concurrency`` at once; (index, answer) as answers come.

    An error of ``ask`` is raised once the answers under way have come; nothing new is asked. An
    interrupt waits for none of them: the threads that ask keep no process alive.
    """
    found: SimpleQueue[tuple[int, Answer] | Exception] = SimpleQueue()
    numbers, lock, over = iter(range(len(prompts))), threading.Lock(), threading.Event()

    def take() -> int | None:
        with lock:
            return None if over.is_set() else next(numbers, None)

    def serve() -> None:
        while (number := take()) is not None:
            try:
                found.put((number, ask(prompts[number])))
            except Exception as error:
                over.set()
                found.put(error)

    count = min(concurrency, len(prompts))
    threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for _ in prompts:
            answer = found.get()
            if isinstance(answer, Exception):
                for thread in threads:
                    thread.join()
                raise answer
            yield answer
    finally:
        over.set()
