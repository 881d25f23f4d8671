"""These tests run in an environment with vLLM (``make test-engines``), and nowhere else."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    import torch

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

    @pytest.fixture(autouse=True)
    def model_dtype() -> Iterator[None]:
        """vLLM builds layers under the model's dtype."""
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(torch.float32)
