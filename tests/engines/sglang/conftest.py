"""These tests run in an environment with sglang (``make test-engines``); others do without."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["*"]
else:
    import torch

    from tests.engines.sglang import without_gpu  # noqa: F401

    # isort: split
    from sglang.srt.plugins import load_plugins

    from backend_core import strict

    load_plugins()  # as sglang's launcher and schedulers do first of all

    @pytest.fixture(autouse=True)
    def fresh_reports(monkeypatch: pytest.MonkeyPatch) -> None:
        """Each test sees what is said once; none inherits strict mode."""
        monkeypatch.setattr(strict, "_reported", set())
        monkeypatch.delenv("KDA_DSV4_STRICT", raising=False)

    @pytest.fixture(autouse=True)
    def inference() -> Iterator[None]:
        with torch.no_grad():
            yield

    @pytest.fixture
    def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
        """What this package says; parsing a command line takes pytest's handler off the root."""
        loggers = [logging.getLogger(name) for name in ("kda_dsv4", "sglang.srt.utils.common")]
        for logger in loggers:
            logger.addHandler(caplog.handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        yield caplog
        for logger in loggers:
            logger.removeHandler(caplog.handler)
            logger.propagate = True
