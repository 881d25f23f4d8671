from __future__ import annotations

import importlib.metadata
import logging
import sys

import pytest

from backend_core import strict
from backend_core.engines import ENGINES, entry
from backend_core.engines.log import chosen
from backend_core.family import families
from backend_core.operator import choose
from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.selection import KdaShape


@pytest.mark.parametrize(
    ("engine", "version", "expected"),
    [
        ("vllm", "0.25.9", False),
        ("vllm", "0.30.0", True),
        ("vllm", "0.30.0rc1", True),
        ("vllm", "0.33.0+cu130", True),
        ("vllm", "0.33.1", False),
        ("vllm", "1.0", False),
        ("sglang", "0.5.9", False),
        ("sglang", "0.5.20.post1", True),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.24", False),
        ("transformers", "5.16.1", False),
        ("transformers", "5.17", True),
        ("transformers", "6.0.0", True),
    ],
)
def test_supported_versions(engine: str, version: str, expected: bool) -> None:
    assert ENGINES[engine].supports(version) is expected


def test_a_version_without_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="must start with a release number, got 'dev'"):
        ENGINES["vllm"].supports("dev")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.11.0", "serves vllm 0.30.0 to 0.33.0, got 0.11.0: nothing is registered"),
        ("0.40.0", "serves vllm 0.30.0 to 0.33.0, got 0.40.0: nothing is registered"),
        ("0.33.0", "could not register kda with vllm: ModuleNotFoundError: "),
        ("dev", "could not register kda with vllm: ModuleNotFoundError: "),
    ],
)
def test_a_release_without_our_imports_goes_on(
    version: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM calls entry points in every process, with or without the flag, and ends with one."""
    for module in ("vllm.logger", "backend_core.engines.vllm_flag", "kda_backend.engines.vllm"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(strict, "_reported", set())
    with caplog.at_level(logging.WARNING, logger="kda_dsv4"):
        for _ in range(2):
            entry.register_vllm("kda")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"kda-dsv4-backend {message}")


@pytest.mark.parametrize(("name", "measured"), [("A100", False), ("H200", True), ("cpu", True)])
def test_the_log_says_what_was_chosen_and_whether_it_was_measured_here(
    name: str, measured: bool
) -> None:
    target = KNOWN_TARGETS[name]
    selections = [
        choose(
            load_table(families()["kda"].tables, target),
            "prefill",
            target,
            KdaShape(2, 2, 128, 128),
        )
    ]
    first, row, *rest = chosen("KDA layers", target, "2 heads", ["a row"], selections)
    assert (first, row) == (f"KDA layers on {target.name} ({target.arch}): 2 heads", "a row")
    assert len(rest) == (not measured)
    assert measured or f"were measured on {target.name} ({target.arch})" in rest[0]
