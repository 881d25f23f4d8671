"""An OpenAI-compatible completions endpoint, asked many prompts at once.

The standard library is enough, so that an evaluation runs from any environment.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from backend_cli.errors import BadInputError
from backend_core.bounded import ANSWER_BYTES, parse_json, read_answer

RETRY_WAITS = (1.0, 4.0)
"""Seconds before the second and the third try of a request that the server did not answer."""
BUSY_WAIT = 2.0
"""The least seconds before a request is sent again that a server refused as too many."""
_SECRET = re.compile(r"(^|_)(key|key_b|password|secret|token)$")


class ServerGoneError(BadInputError):
    """The server does not answer, or answers with an error of its own (5xx)."""


class ServerBusyError(ServerGoneError):
    """The server has too many requests (429), and may take this one after ``wait`` seconds."""

    def __init__(self, sentence: str, after: str | None) -> None:
        """``after`` is its header ``Retry-After``: seconds, or a date, which is passed over."""
        super().__init__(sentence)
        named = float(after) if after is not None and after.isdecimal() else 0.0
        self.wait = max(BUSY_WAIT, named)


@dataclass(frozen=True)
class Server:
    """What a server says about itself.

    Attributes:
        model: the served name that requests give.
        engine, version: ``"vllm"``, ``"0.26.0"``; ``None`` where it does not say.
        backend: the attention backend, ``None`` where it does not say (vLLM never does).
        flags: its settings where it tells them (sglang), without keys and passwords; else
            ``None``.
    """

    model: str
    engine: str | None
    version: str | None
    backend: str | None
    flags: dict[str, Any] | None


@dataclass(frozen=True)
class Endpoint:
    """The address of a server, and how long one answer may take."""

    base_url: str
    timeout: float = 600.0

    @staticmethod
    def parse(base_url: str, timeout: float = 600.0) -> Endpoint:
        """Accept ``http://host:port`` with or without a final ``/`` or ``/v1``.

        Raises:
            BadInputError: it is no such URL.
        """
        url = base_url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and parts.netloc != "" and parts.port != 0
        except ValueError:  # brackets of an address without their like, or a port that is none
            known = False
        if not known:
            raise BadInputError(f"--base-url must be like http://localhost:8000, got {base_url!r}")
        return Endpoint(url, timeout)

    def server(self, model: str | None) -> Server:
        """What serves there; ``model`` picks one of several, by default the only one.

        Raises:
            ServerGoneError: nothing answers.
            BadInputError: what answers is no such endpoint, or does not serve this model.
        """
        try:
            served = [entry["id"] for entry in self._get("/v1/models")["data"]]
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
            raise BadInputError(f"--model must be one of {', '.join(served)}, got {got}")
        info = self._try_get("/server_info") or self._try_get("/get_server_info")
        if isinstance(info, dict) and "attention_backend" in info:
            backend = info["attention_backend"]
            return Server(model, "sglang", info.get("version"), backend, _public(info))
        version = self._try_get("/version")
        if isinstance(version, dict) and isinstance(version.get("version"), str):
            engine = str(version.get("engine", "vllm"))
            return Server(model, engine, version["version"], version.get("backend"), None)
        return Server(model, None, None, None, None)

    def complete(self, request: dict[str, Any]) -> str:
        """The text of one completion.

        A server with too many requests is asked again until `timeout` is over.

        Raises:
            ServerGoneError: the server does not answer, three times, or stays busy.
            BadInputError: it refuses the request.
        """
        pauses, deadline = iter(RETRY_WAITS), time.monotonic() + self.timeout
        while True:
            try:
                text = self._send("/v1/completions", request)["choices"][0]["text"]
                break
            except ServerBusyError as error:
                if time.monotonic() + error.wait > deadline:
                    raise
                time.sleep(error.wait)
            except ServerGoneError:
                pause = next(pauses, None)
                if pause is None:
                    raise
                time.sleep(pause)
            except (KeyError, IndexError, TypeError) as error:
                raise BadInputError(
                    f"{self.base_url} answered a completion without choices[0].text"
                ) from error
        if not isinstance(text, str):
            raise BadInputError(f"{self.base_url} answered a completion that is not text: {text!r}")
        return text

    def _get(self, path: str) -> Any:
        return self._send(path, None)

    def _try_get(self, path: str) -> Any:
        try:
            return self._get(path)
        except BadInputError:
            return None

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            if not (key.isascii() and key.isprintable()):  # the error about a header would show it
                raise BadInputError(
                    "OPENAI_API_KEY must be printable ASCII: it may end as a line of a file does"
                )
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, headers)
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                answer = read_answer(response, ANSWER_BYTES, self.timeout)
                if response.length:  # bytes that were promised: the server ended meanwhile
                    raise http.client.IncompleteRead(answer, response.length)
                return parse_json(answer)
        except urllib.error.HTTPError as error:
            said = " ".join(_begin_of(error).decode(errors="replace").split())[:300]
            if error.code == 404 and body is None:
                raise NotThereError(f"{self.base_url} has no {path}") from error
            sentence = f"{self.base_url}{path} answered {error.code}: {said}"
            if error.code == 429:
                raise ServerBusyError(sentence, error.headers.get("Retry-After")) from error
            kind = ServerGoneError if error.code >= 500 else BadInputError
            raise kind(sentence) from error
        except ValueError as error:
            raise BadInputError(
                f"{self.base_url}{path} did not answer with JSON: {error}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ServerGoneError(
                f"no answer from a server at {self.base_url}: {reason}"
            ) from error


def _public(info: dict[str, Any]) -> dict[str, Any]:
    """Settings for a record that others read: without secrets, in a command line neither."""
    plain = {k: v for k, v in info.items() if isinstance(v, str | int | float | bool)}
    secrets = [v for k, v in plain.items() if _SECRET.search(k) and isinstance(v, str) and v]
    secrets += [key for key in [os.environ.get("OPENAI_API_KEY")] if key]
    shown = {k: v for k, v in plain.items() if not _SECRET.search(k)}
    for name, value in shown.items():
        for secret in secrets:
            if isinstance(value, str) and secret in value:
                shown[name] = value = value.replace(secret, "...")
    return shown


def _begin_of(error: urllib.error.HTTPError) -> bytes:
    """What a server says about its error, where it says so to the end."""
    try:
        return error.read(2000)
    except (OSError, http.client.HTTPException):
        return b""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for the server that the user named, and for no other that it names."""

    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class NotThereError(BadInputError):
    """The server answers, but has no such page."""


def ask_all(
    ask: Callable[[str], str],
    prompts: Sequence[str],
    concurrency: int,
    done: Callable[[int, str], None],
) -> None:
    """Ask every prompt, ``concurrency`` at once, and report (index, answer) as answers come.

    ``done`` is called in this thread. Where ``ask`` raises, nothing new is asked, the answers under
    way are waited for and reported, and the first error is raised. An interrupt waits for nothing.
    """
    if concurrency == 1:
        for index, prompt in enumerate(prompts):
            done(index, ask(prompt))
        return
    waiting: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[int, str] | BaseException | None] = queue.SimpleQueue()
    for item in enumerate(prompts):
        waiting.put(item)
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                index, prompt = waiting.get_nowait()
                finished.put((index, ask(prompt)))
        except queue.Empty:
            pass
        except BaseException as error:
            stop.set()
            finished.put(error)
        finally:
            finished.put(None)

    failure: BaseException | None = None
    # an answer may take minutes: a thread that waits for one must not keep the program
    threads = [
        threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(prompts)))
    ]
    for thread in threads:
        thread.start()
    running = len(threads)
    try:
        while running:
            item_or_error = finished.get()
            if item_or_error is None:
                running -= 1
            elif isinstance(item_or_error, BaseException):
                failure = failure or item_or_error
            else:
                done(*item_or_error)
    finally:
        stop.set()
    if failure is not None:
        raise failure
