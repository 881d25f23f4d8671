"""These tests run in an environment with vLLM (``make test-engines``), and nowhere else."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    from tests.engines.vllm.conftest import fresh_reports, one_rank  # noqa: F401

    @pytest.fixture
    def said() -> Iterator[list[str]]:
        """What the adapter and the fallbacks log; vLLM's loggers do not propagate."""
        from backend_core.engines import vllm_flag

        lines: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                lines.append(record.getMessage())

        handler = Keep()
        loggers = [vllm_flag.logger, logging.getLogger("kda_dsv4")]
        for logger in loggers:
            logger.addHandler(handler)
        yield lines
        for logger in loggers:
            logger.removeHandler(handler)
