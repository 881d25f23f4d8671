from __future__ import annotations

import logging
import sys

import pytest

from backend_core import strict
from backend_core.engines import ENGINES, entry
from backend_core.engines.log import chosen
from backend_core.family import families
from backend_core.operator import choose
from backend_core.tables.load import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.selection import KdaShape


@pytest.mark.parametrize(
    ("engine", "version", "expected"),
    [
        ("vllm", "0.31.0", False),
        ("vllm", "0.33.0", True),
        ("vllm", "0.33.0rc1", True),
        ("vllm", "0.33.0+cu130", True),
        ("vllm", "0.33.1", False),
        ("sglang", "0.5.22.post1", True),
        ("sglang", "0.5.24", False),
        ("vllm", "dev", False),
    ],
)
def test_tested_releases(engine: str, version: str, expected: bool) -> None:
    assert ENGINES[engine].is_tested(version) is expected


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm.logger", "backend_core.engines.vllm_flag", "kda_backend.engines.vllm"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(strict, "_reported", set())


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("vllm 0.11.0 does not fit the flag", ": vllm 0.11.0 does not fit the flag; nothing is"),
        (None, " could not register kda with vllm: ModuleNotFoundError: "),
    ],
)
def test_a_release_without_our_imports_goes_on(
    reason: str | None,
    message: str,
    without_vllm: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM calls entry points in every process, with or without the flag, and ends with one."""
    monkeypatch.setattr(entry, "difference", lambda part: reason)
    with caplog.at_level(logging.WARNING, logger="kda_dsv4"):
        for _ in range(2):
            entry.register_vllm("kda")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"kda-dsv4-backend{message}")


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
