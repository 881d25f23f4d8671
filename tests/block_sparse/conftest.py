from __future__ import annotations

from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of this tree, whatever a user has."""
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(CONFIGS))
