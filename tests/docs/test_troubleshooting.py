"""Every message of docs/troubleshooting.md is one that the code can give, and every refusal of an
engine's adapter for KDA stands there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend_core.family import PACKAGES

ROOT = Path(__file__).parents[2]
OURS = ("backend_cli", "backend_core", *PACKAGES)


def messages() -> list[str]:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def text_of(node: ast.AST | None) -> str | None:
    """A string of the source, with a NUL where a value is put in."""
    if isinstance(node, ast.JoinedStr):
        parts = [getattr(part, "value", "\0") for part in node.values]
        return "".join(part if isinstance(part, str) else "\0" for part in parts)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", "\0")
    return None


def strings() -> list[str]:
    files = [file for package in OURS for file in (ROOT / package).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return [text for text in map(text_of, nodes) if text is not None]


def refusals() -> Iterator[str]:
    """What the adapters of KDA say or raise, without what only passes on another reason."""
    places = ("kda_backend/engines/*.py", "backend_core/engines/*_flag.py")
    for file in [file for place in places for file in ROOT.glob(place)]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            found: list[ast.AST | None] = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("fallback", "_say"):
                found = list(node.args)
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if getattr(node.exc.func, "id", "") in ("ValueError", "RuntimeError"):
                    found = list(node.exc.args)
            elif isinstance(node, ast.FunctionDef) and node.name == "_refusal":
                found = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            texts = [text for text in map(text_of, found) if text is not None]
            yield from (text for text in texts if len(text.rstrip("\0 :").strip("\0")) > 30)


SOURCE = strings()


def pattern(message: str) -> re.Pattern[str]:
    """The message's fixed parts, in order."""
    parts = [re.escape(part) for part in re.split(r"\s*…\s*", message) if part.strip()]
    return re.compile(".*?".join(parts), re.DOTALL)


def gives(message: str) -> bool:
    """Whether some string of the source has the message's fixed parts."""
    return any(pattern(message).search(text) for text in SOURCE)


@pytest.mark.parametrize("message", messages())
def test_the_code_gives_this_message(message: str) -> None:
    assert gives(message)


@pytest.mark.parametrize("refusal", sorted(set(refusals())))
def test_a_refusal_of_an_adapter_is_listed(refusal: str) -> None:
    assert any(pattern(message).search(refusal) for message in messages())


def test_there_are_messages_and_an_invented_one_is_found_out() -> None:
    assert len(messages()) > 25 and len(set(refusals())) > 12
    assert not gives("the kernel … is out of coffee")


def test_every_environment_variable_is_listed() -> None:
    found = {text for text in SOURCE if re.fullmatch(r"KDA_DSV4_[A-Z_]+|FLA_KDA_DSV4", text)}
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (\w*KDA_DSV4\w*) \|", text, re.MULTILINE)) == found
