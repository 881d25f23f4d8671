"""Tests of a family in an engine run where that engine is installed (``make test-engines``)."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest

from backend_core import strict

collect_ignore_glob = [
    f"*/{folder}/*"
    for folder, package in (("vllm", "vllm"), ("sglang", "sglang"), ("fla_core", "fla"))
    if importlib.util.find_spec(package) is None
]


@pytest.fixture(autouse=True)
def fresh_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees what is logged once; none inherits strict mode."""
    monkeypatch.setattr(strict, "_reported", set())
    monkeypatch.delenv("KDA_DSV4_STRICT", raising=False)
    if importlib.util.find_spec("vllm") is not None:
        from backend_core.engines import vllm_flag

        monkeypatch.setattr(vllm_flag, "_logged", set())


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What adapters and fallbacks log.

    By a handler of its own: parsing a command line takes pytest's off the root logger.
    """
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    loggers = [
        logging.getLogger(name) for name in ("kda_dsv4", "vllm.kda_dsv4", "sglang.srt.utils.common")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    yield lines
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
        logger.removeHandler(handler)
