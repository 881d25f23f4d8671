"""What others have written is data of bounded size: files, tables, answers of a server."""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from backend_cli.errors import BadInputError
from backend_cli.eval.endpoint import Endpoint
from backend_cli.files import read_json
from backend_core import bounded
from backend_core.family import families
from backend_core.tables.schema import parse_table
from kda_backend.launch_params import TABLES

ROOT = Path(__file__).parents[2]
PACKAGES = ("backend_core", "backend_cli", "kda_backend", "dsv4_backend", "softmax_backend")
DEEP = "[" * 100_000


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"12345")
    assert bounded.read_bytes(file, 5) == b"12345"
    with pytest.raises(ValueError, match="expected at most 4 bytes in"):
        bounded.read_bytes(file, 4)
    with pytest.raises(FileNotFoundError):
        bounded.read_bytes(tmp_path / "none", 4)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_never_ends_is_not_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises((ValueError, OSError), match=r"expected a regular file|directory"):
        bounded.read_bytes(file, 100)


def test_nesting_without_end_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not nested so deeply"):
        bounded.parse_json(DEEP)
    with pytest.raises(ValueError, match="not nested so deeply"):
        bounded.parse_toml(f"x = {DEEP}")
    file = tmp_path / "result.json"
    file.write_text(DEEP)
    with pytest.raises(BadInputError, match=r"the result .* must be JSON, got expected JSON that"):
        read_json(file, "the result")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * (bounded.TABLE_BYTES + 1), "expected at most 1048576 bytes"),
        (f"x = {DEEP}".encode(), "not nested so deeply"),
        (b"\xff\xfe", "codec can't decode"),
        (b'x = """', "not valid TOML"),
    ],
)
def test_a_hostile_table_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "nvidia_sm90.toml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        parse_table(file, TABLES, "nvidia_sm90")
    assert str(raised.value).startswith(str(file))


def test_a_result_has_a_largest_size(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("[" + "1," * 1000 + "1]")
    with pytest.raises(BadInputError, match="expected at most 100 bytes"):
        read_json(file, "the result", most=100)


class Drip:
    """A server that sends a byte at a time, for ever."""

    def read1(self, size: int, /) -> bytes:
        return b" "


def test_an_answer_has_a_largest_size_and_time() -> None:
    assert bounded.read_answer(io.BytesIO(b"{}"), 10, 1.0) == b"{}"
    with pytest.raises(ValueError, match="expected an answer of at most 10 bytes"):
        bounded.read_answer(io.BytesIO(b"x" * 100_000), 10, 1.0)
    with pytest.raises(TimeoutError, match="expected the whole answer within 0 s"):
        bounded.read_answer(Drip(), 1 << 30, 0.0)


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers what its ``answer`` holds; ``seen`` has the headers of each request by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
            status, headers, body = server.answer  # type: ignore[attr-defined]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: Any) -> Any:
    return Endpoint(f"http://127.0.0.1:{server.server_port}", timeout=10.0)._get("/v1/models")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (DEEP.encode(), "not nested so deeply"),
        (b'"' + b"x" * (bounded.ANSWER_BYTES + 1) + b'"', "expected an answer of at most"),
        (b"\xff", "did not answer with JSON"),
    ],
    ids=["deep", "large", "no text"],
)
def test_a_hostile_answer_is_one_sentence(server: Any, body: bytes, message: str) -> None:
    server.answer = (200, {}, body)
    with pytest.raises(BadInputError, match=message):
        ask(server)


def test_a_server_cannot_send_the_key_elsewhere(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.answer = (302, {"Location": f"http://localhost:{server.server_port}/taken"}, b"")
    with pytest.raises(BadInputError, match="answered 302"):
        ask(server)
    assert [path for path, _ in server.seen] == ["/v1/models"]


@pytest.mark.parametrize("name", ["../kda", "a/b", "", "..", "a b"])
def test_a_family_s_name_stays_in_its_folder(name: str) -> None:
    """Tables, results of tuning and path tables are files below folders of that name."""
    with pytest.raises(ValueError, match="the name of a family must be an identifier"):
        dataclasses.replace(families()["kda"], name=name)


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"torch.load", "yaml.load", "numpy.load", "np.load", "eval", "os.system"}
GENERATED = {
    "backend_core/contracts.py",
    "backend_core/launch/cuda.py",
    "backend_core/launch/triton.py",
}
"""Files that build a function from their own lists of names, with ``exec``."""


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_that_is_read_becomes_code() -> None:
    """No pickle, no ``eval``, no shell; ``exec`` in those files alone, whose text is ours."""
    found = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            where = str(file.relative_to(ROOT))
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names if alias.name in FORBIDDEN_MODULES]
                elif isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN_MODULES:
                    names = [str(node.module)]
                elif isinstance(node, ast.Call):
                    called = name_of(node.func)
                    shell = any(k.arg == "shell" for k in node.keywords)
                    if called in FORBIDDEN_CALLS or shell:
                        names = [called]
                    if called == "exec" and where not in GENERATED:
                        names = [called]
                found += [f"{where}: {name}" for name in names]
    assert found == []
