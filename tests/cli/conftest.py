from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_user_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("KDA_DSV4_CONFIG_DIR", "KDA_DSV4_STRICT", "KDA_DSV4_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
