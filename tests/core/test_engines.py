from __future__ import annotations

import importlib.metadata

import pytest

from backend_core.engines import ENGINES


@pytest.mark.parametrize(
    ("engine", "version", "expected"),
    [
        ("vllm", "0.25.9", False),
        ("vllm", "0.26.0", True),
        ("vllm", "0.26.0rc1", True),
        ("vllm", "0.33.0+cu130", True),
        ("vllm", "0.33.1", False),
        ("vllm", "1.0", False),
        ("sglang", "0.5.9", False),
        ("sglang", "0.5.17.post1", True),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.24", False),
        ("transformers", "5.16.1", False),
        ("transformers", "5.17", True),
        ("transformers", "6.0.0", True),
    ],
)
def test_supported_versions(engine: str, version: str, expected: bool) -> None:
    assert ENGINES[engine].supports(version) is expected


def test_installed_version_is_read_from_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.30.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert ENGINES["vllm"].installed() == "0.30.0"
    assert ENGINES["sglang"].installed() is None


def test_a_version_without_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="must start with a release number, got 'dev'"):
        ENGINES["vllm"].supports("dev")
