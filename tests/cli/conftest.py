from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from backend_cli.eval import endpoint


@pytest.fixture(autouse=True)
def no_user_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("KDA_DSV4_CONFIG_DIR", "KDA_DSV4_STRICT", "KDA_DSV4_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``eval`` writes, and where the harness keeps data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a server answers by path, a function of the request's body for instance; ``url`` is its
    address, ``seen`` the headers it got. Between tries of a request no time passes."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", (0.0, 0.0, 0.0))
    answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "m"}]}, "seen": [], "paths": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self, body: Any = None) -> None:
            answers["seen"].append(self.headers)
            answers["paths"].append(self.path)
            answer = answers.get(self.path)
            answer = answer(body) if callable(answer) else answer
            status, said = answer if isinstance(answer, tuple) else (200, answer)
            self.send_response(404 if answer is None else status)
            if status == 302:
                self.send_header("Location", f"{answers['url']}/taken")
            self.end_headers()
            self.wfile.write(said if isinstance(said, bytes) else json.dumps(said).encode())

        def do_POST(self) -> None:
            self.do_GET(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    answers["url"] = f"http://127.0.0.1:{server.server_address[1]}"
    yield answers
    server.shutdown()
    thread.join()
    server.server_close()
