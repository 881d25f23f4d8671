"""Every message of docs/troubleshooting.md is one that the code can give."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("backend_cli", "backend_core", "dsv4_backend", "kda_backend")


def messages() -> list[str]:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def strings() -> list[str]:
    """Every string of the source, with a NUL where a value is put in."""
    found = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", "\0") for part in node.values]
                    found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value.replace("%s", "\0"))
    return found


SOURCE = strings()


def gives(message: str) -> bool:
    """Whether some string of the source has the message's fixed parts, in order."""
    parts = [re.escape(part) for part in re.split(r"\s*…\s*", message) if part.strip()]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in SOURCE)


@pytest.mark.parametrize("message", messages())
def test_the_code_gives_this_message(message: str) -> None:
    assert gives(message)


def test_there_are_messages_and_an_invented_one_is_found_out() -> None:
    assert len(messages()) > 25
    assert not gives("the kernel … is out of coffee")
