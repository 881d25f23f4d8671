from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_backend.testing.cases import PATHS

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of this tree, whatever a user has."""
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(CONFIGS))


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Every path that runs here: Triton's on the GPU or in the interpreter."""
    name: str = request.param
    return name


@pytest.fixture
def path_device(path: str, device: torch.device) -> torch.device:
    """Where the path runs."""
    return torch.device("cpu") if path == "torch" else device
