"""What the benchmarks rely on in sglang's own code."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from benchmarks import serve_sglang


def test_weights_are_drawn_where_sglang_draws_its_dummies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(sys, "path", list(sys.path))
    serve_sglang.plant(tmp_path)
    found = [one for one in entry_points(group="sglang.srt.plugins")]
    planted = next(one for one in found if one.name == serve_sglang.PLUGIN)
    loader = pytest.importorskip("sglang.srt.model_loader.loader")
    monkeypatch.setattr(loader, "initialize_dummy_weights", loader.initialize_dummy_weights)
    planted.load()()
    assert loader.initialize_dummy_weights is serve_sglang.draw_weights


def test_every_argument_of_the_engine_exists(tmp_path: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    config = tmp_path / "config.json"
    config.write_text('{"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}}')
    args = argparse.Namespace(
        config=tmp_path, layers=2, flag=True, engine_option=["disable_cuda_graph=true"]
    )
    arguments = serve_sglang.engine_arguments(args)
    known = set(inspect.signature(ServerArgs).parameters)
    assert set(arguments) <= known and arguments["disable_cuda_graph"] is True
