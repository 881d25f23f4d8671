"""These tests run in an environment with vLLM (``make test-engines``), and nowhere else."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    from backend_core import strict

    @pytest.fixture(scope="session", autouse=True)
    def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """A distributed group of this process alone, as a worker has one."""
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        place = tmp_path_factory.mktemp("rendezvous") / "file"
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
            initialize_model_parallel(1, 1)
        yield

    @pytest.fixture(autouse=True)
    def fresh_reports(monkeypatch: pytest.MonkeyPatch) -> None:
        """Each test sees what is said once; none inherits strict mode."""
        from backend_core.engines import vllm_flag

        monkeypatch.setattr(strict, "_reported", set())
        monkeypatch.setattr(vllm_flag, "_said", set())
        monkeypatch.delenv("KDA_DSV4_STRICT", raising=False)

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
