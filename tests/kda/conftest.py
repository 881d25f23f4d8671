from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kda.cases import Backend


@pytest.fixture(autouse=True)
def poisoned_allocations() -> Iterator[None]:
    """torch.empty returns NaN (integers: their maximum): what is read unwritten, shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def kernels(device: torch.device) -> Backend:
    """The Triton paths."""
    return Backend("kernels", device)


@pytest.fixture(params=["kernels", "torch"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    """The Triton paths, then the CPU's."""
    return Backend(request.param, device if request.param == "kernels" else torch.device("cpu"))
