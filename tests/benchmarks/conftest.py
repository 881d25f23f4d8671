from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.fake_vllm import SOURCE


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "fake"
    package = place / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "main.py").write_text(SOURCE)
    (place / "sglang").mkdir()
    (place / "sglang" / "__init__.py").write_text("")
    ready = 'print("The server is fired up", flush=True)\nServer('
    assert SOURCE.count("\nServer(") == 1
    (place / "sglang" / "launch_server.py").write_text(SOURCE.replace("\nServer(", "\n" + ready))
    monkeypatch.setenv("PYTHONPATH", str(place))
    return place
