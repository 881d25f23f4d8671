from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kda.cases import ON_GPU, Backend, Run


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """torch.empty returns NaN (integers: their maximum): what is read unwritten, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


VARIANTS = ["kernels", "kernels_128"] if ON_GPU else ["kernels"]


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    """The kernels."""
    return Backend(request.param, device)


@pytest.fixture(params=[*VARIANTS, "torch"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    """The kernels, then the CPU's path."""
    return Backend(request.param, torch.device("cpu") if request.param == "torch" else device)


@pytest.fixture(params=["chunk", "recurrent"])
def run(request: pytest.FixtureRequest, backend: Backend) -> Run:
    """Prefill, then the recurrence."""
    method: Run = getattr(backend, request.param)
    return method
