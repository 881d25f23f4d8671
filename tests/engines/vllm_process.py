"""Fixtures of the tests in vLLM, which their ``conftest.py`` files import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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


@pytest.fixture
def model_dtype() -> Iterator[None]:
    """vLLM builds layers under the model's dtype."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
