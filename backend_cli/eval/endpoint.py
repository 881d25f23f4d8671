"""An OpenAI-compatible completions endpoint, asked with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from backend_cli.errors import BadInputError
from backend_core.bounded import ANSWER_BYTES, parse_json, read_answer


@dataclass(frozen=True)
class Server:
    """A server's description of itself.

    Attributes:
        model: the served name that requests give.
        engine, version: ``"vllm"``, ``"0.26.0"``; ``None`` where it does not say.
        backend: the attention backend, ``None`` where it does not say (vLLM never does).
    """

    model: str
    engine: str | None
    version: str | None
    backend: str | None


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
        except ValueError:  # unbalanced brackets, or an invalid port
            known = False
        if not known:
            raise BadInputError(f"--base-url must be like http://localhost:8000, got {base_url!r}")
        return Endpoint(url, timeout)

    def server(self, model: str | None) -> Server:
        """The server there; ``model`` picks one of several, by default the only one.

        Raises:
            BadInputError: nothing answers, or no such endpoint, or it does not serve this model.
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
            return Server(model, "sglang", info.get("version"), backend)
        version = self._try_get("/version")
        if isinstance(version, dict) and isinstance(version.get("version"), str):
            engine = str(version.get("engine", "vllm"))
            return Server(model, engine, version["version"], version.get("backend"))
        return Server(model, None, None, None)

    def complete(self, request: dict[str, Any]) -> str:
        """The text of one completion.

        Raises:
            BadInputError: the server does not answer, or refuses the request.
        """
        try:
            text = self._send("/v1/completions", request)["choices"][0]["text"]
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
            raise BadInputError(f"{self.base_url}{path} answered {error.code}: {said}") from error
        except ValueError as error:
            raise BadInputError(
                f"{self.base_url}{path} did not answer with JSON: {error}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise BadInputError(f"no answer from a server at {self.base_url}: {reason}") from error


def _begin_of(error: urllib.error.HTTPError) -> bytes:
    """The first bytes of an error's answer; empty if the server ends before it."""
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
    ask: Callable[[str], str], prompts: Sequence[str], concurrency: int
) -> Iterator[tuple[int, str]]:
    """Ask every prompt, ``concurrency`` at once; (index, answer) as answers come.

    An error of ``ask`` is raised once the answers under way have come; nothing new is asked.
    """
    with ThreadPoolExecutor(concurrency) as pool:
        asked = {pool.submit(ask, prompt): index for index, prompt in enumerate(prompts)}
        try:
            for future in as_completed(asked):
                yield asked[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
