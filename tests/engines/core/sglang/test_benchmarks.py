"""What the benchmarks rely on in sglang's own code."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import recall_sglang, serve_sglang
from benchmarks.engines.sglang_server import plant


def test_weights_are_drawn_where_sglang_draws_its_dummies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(sys, "path", list(sys.path))
    plant(tmp_path, serve_sglang.PLUGIN, "benchmarks.serve_sglang:draw_at_load")
    found = [one for one in entry_points(group="sglang.srt.plugins")]
    planted = next(one for one in found if one.name == serve_sglang.PLUGIN)
    loader = pytest.importorskip("sglang.srt.model_loader.loader")
    monkeypatch.setattr(loader, "initialize_dummy_weights", loader.initialize_dummy_weights)
    planted.load()()
    assert loader.initialize_dummy_weights is serve_sglang.draw_weights


@pytest.mark.parametrize("full", serve_sglang.FULL_ATTENTION)
@pytest.mark.parametrize("flag", [False, True])
def test_every_argument_of_the_engine_exists(flag: bool, full: str, tmp_path: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    config = tmp_path / "config.json"
    config.write_text('{"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}}')
    args = argparse.Namespace(config=tmp_path, flag=flag, full_attention=full)
    arguments = serve_sglang.engine_arguments(args)
    known = set(inspect.signature(ServerArgs).parameters)
    assert set(arguments) <= known


@pytest.mark.parametrize("name", recall_sglang.VARIANTS)
def test_sglang_takes_every_servers_options(name: str, tmp_path: Path) -> None:
    from sglang.srt import server_args

    server = recall_sglang.server_of(name, 8000, tmp_path / "log", 1.0, [])
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    found = parser.parse_args(server.command[server.command.index("--model-path") :])
    variant = recall_sglang.VARIANTS[name]
    assert (found.attention_backend == "kda") == variant.flagged
    assert found.page_size == (64 if name.endswith("mla") else None)
    assert found.tp_size == (2 if name == "tp2" else 1)


@pytest.mark.parametrize("name", [n for n, v in recall_sglang.VARIANTS.items() if v.drafts])
def test_drafts_are_a_chain_that_is_verified_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang resolves the options to chains, which `kda_backend` takes, with the prefix cache."""
    from sglang.srt import server_args
    from sglang.srt.arg_groups import mamba_hook

    # drafts beside prefixes ask for a GPU
    monkeypatch.setattr(mamba_hook, "get_platform", lambda: SimpleNamespace(is_cuda=True))
    server = recall_sglang.server_of(name, 8000, tmp_path / "log", 1.0, [])
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    options = [*server.command[server.command.index("--model-path") :], "--device", "cpu"]
    args = server_args.ServerArgs.from_cli_args(parser.parse_args(options))
    args.resolve_once()
    found = SimpleNamespace(**args.resolved_dict())
    assert found.speculative_algorithm == "NGRAM" and found.speculative_eagle_topk == 1
    assert found.speculative_num_draft_tokens == 4 and not found.disable_radix_cache


def test_accepted_drafts_are_read_off_the_log() -> None:
    """As sglang writes them."""
    package = Path(inspect.getfile(importlib.import_module("sglang"))).parent / "srt"
    reporter = package / "managers" / "scheduler_components" / "metrics_reporter.py"
    assert 'f"accept len: {spec_accept_length:.2f}, ' in reporter.read_text()
    assert recall_sglang.accepted_tokens("#token: 3, accept len: 1.00, accept rate: 0.0") is None
    assert recall_sglang.accepted_tokens("accept len: 2.50, \naccept len: 1.00, ") == 2.5


def test_what_the_servers_are_told_is_a_route_of_sglangs() -> None:
    package = Path(inspect.getfile(importlib.import_module("sglang"))).parent
    text = (package / "srt" / "entrypoints" / "http_server.py").read_text()
    calls = [
        path
        for variant in recall_sglang.VARIANTS.values()
        for _, together in variant.then
        for path, _ in together
    ]
    assert set(calls) == {
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_disk",
    }
    assert all(f'"{path}"' in text for path in calls)
