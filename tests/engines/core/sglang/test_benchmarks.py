"""What the benchmarks rely on in sglang's own code."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import dsv4_engine_sglang, recall_sglang, serve_sglang
from benchmarks.engines import dsv4_model, dsv4_sglang_plugin, dsv4_sglang_side
from benchmarks.engines.dsv4_model import BATCHED_TOKENS, MTP_SIDES, SIDES
from benchmarks.engines.vllm_server import plant
from kda_backend.engines import sglang_prefill_graphs

CONFIGS = Path(serve_sglang.__file__).parent / "engines" / "configs"
SERVER_ARGS = "sglang.srt.server_args"
with_the_models = pytest.mark.skipif(
    version("sglang") == "0.5.22",
    reason="0.5.23 has the models, and runs them in graphs",
)


def test_weights_are_drawn_where_sglang_draws_its_dummies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(sys, "path", list(sys.path))
    plant(tmp_path, "sglang.srt.plugins", "benchmarks.serve_sglang:draw_at_load")
    found = [one for one in entry_points(group="sglang.srt.plugins")]
    planted = next(one for one in found if one.name == "draw_at_load")
    loader = pytest.importorskip("sglang.srt.model_loader.loader")
    monkeypatch.setattr(loader, "initialize_dummy_weights", loader.initialize_dummy_weights)
    planted.load()()
    assert loader.initialize_dummy_weights is serve_sglang.draw_weights


def test_a_schedulers_steps_are_written_as_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers import scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    assert list(inspect.signature(scheduler.Scheduler.run_batch).parameters)[:2] == [
        "self",
        "batch",
    ]
    monkeypatch.setattr(scheduler.Scheduler, "run_batch", lambda self, batch: batch.forward_mode)
    monkeypatch.setenv(serve_sglang.STEP_LOG, str(tmp_path))
    serve_sglang.log_steps(scheduler)
    modes = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.IDLE

    def run() -> None:
        for mode in modes:
            batch = SimpleNamespace(forward_mode=mode, reqs=[1, 2])
            assert scheduler.Scheduler.run_batch(SimpleNamespace(), batch) is mode

    steps = serve_sglang.SchedulerLog(tmp_path, drafts=2).of(run)
    assert [tokens for _, tokens in steps] == [serve_sglang.PREFILL, 6, 6]


MODELS = {
    "kimi_k3": ("sglang.srt.models.kimi_k3", "KimiK3DeltaAttention"),
    "glm_5_3_flash": ("sglang.srt.models.glm5_next", "Glm5NextLinearAttention"),
    "ling_3_tiny": ("sglang.srt.models.bailing_moe_v3", "BailingKDA"),
}


def options(name: str, *words: str) -> argparse.Namespace:
    """Those of one side, as its parent gives them, of a model of `CONFIGS`."""
    found: list[argparse.Namespace] = []
    folder = ["--config", str(CONFIGS / name), "--layers", "4", "--experts", "16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_sglang, "run", lambda args: bool(found.append(args)))
        patch.setattr(sys, "argv", ["serve_sglang", "run", "side.json", *folder, *words])
        assert serve_sglang.main() == 0
    return found[0]


def resolved(args: argparse.Namespace) -> Any:
    """What sglang makes of a side's arguments on a machine without a GPU."""
    from sglang.srt.server_args import ServerArgs

    known = set(inspect.signature(ServerArgs).parameters)
    arguments = serve_sglang.engine_arguments(args)
    assert set(arguments) <= known
    on_the_cpu = {"device": "cpu", "mamba_radix_cache_strategy": "no_buffer"}
    found = ServerArgs(**arguments, **on_the_cpu, disable_overlap_schedule=True)
    found.resolve_once()
    return found


@pytest.mark.parametrize("full", serve_sglang.FULL_ATTENTION)
@pytest.mark.parametrize("turns", [False, True])
def test_every_argument_of_the_engine_exists(full: str, turns: bool, tmp_path: Path) -> None:
    words = ["--turns", str(tmp_path / "turns")] if turns else []
    args = options("kimi_k3", "--full-attention", full, *words, "--variant", "no_prefill_graphs")
    known = set(inspect.signature(importlib.import_module(SERVER_ARGS).ServerArgs).parameters)
    assert set(serve_sglang.engine_arguments(args)) <= known


@with_the_models
@pytest.mark.parametrize(
    ("name", "words", "backend"),
    [
        ("glm_5_3_flash", (), "breakable"),
        ("glm_5_3_flash", ("--flag",), "breakable"),
        ("glm_5_3_flash", ("--flag", "--variant", "no_prefill_graphs"), "disabled"),
        ("kimi_k3", (), "disabled"),
        ("kimi_k3", ("--flag",), "breakable"),
        ("kimi_k3", ("--flag", "--variant", "no_prefill_graphs"), "disabled"),
        ("ling_3_tiny", ("--flag",), "breakable"),
    ],
)
def test_prefill_graphs_of_each_side(
    name: str, words: tuple[str, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: sglang's own for GLM-5.3-Flash, those of the flag for the others."""
    from sglang.srt.arg_groups.cuda_graph_hook import resolving_view
    from sglang.srt.model_executor import cuda_graph_config

    monkeypatch.setattr(sglang_prefill_graphs, "is_cuda", lambda: True)
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")
    found = resolved(options(name, *words))
    assert resolving_view(found).cuda_graph_config.prefill.backend == backend


@with_the_models
@pytest.mark.parametrize("name", [name for name in MODELS if name != "ling_3_tiny"])
def test_a_model_of_full_width_is_built_without_its_tower(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On torch's meta device; rotary embeddings, which Ling-V3 has, need a compiled library."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.runtime_context import get_parallel, publish

    from tests.engines.kda.sglang.harness import one_rank

    args = resolved(options(name))
    publish(args, role="test")
    one_rank()
    config = ModelConfig.from_server_args(args)
    assert not config.is_multimodal and config.context_len == 70000
    module = importlib.import_module(MODELS[name][0])
    model_of = MODELS[name][0].rpartition(".")[2]
    for tower in serve_sglang.TOWERS[model_of]:
        monkeypatch.setattr(module, tower, getattr(module, tower))  # put back afterwards
    serve_sglang.without_towers(module, serve_sglang.TOWERS[model_of])
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    alone = {"pp_rank": 0, "pp_size": 1, "moe_ep_rank": 0, "moe_tp_rank": 0}
    with get_parallel().override(**alone, moe_ep_size=1, moe_tp_size=1), torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        model = get_model_architecture(config)[0](config=config.hf_config)
        torch.set_default_dtype(torch.float32)
    kinds = [type(m).__name__ for n, m in model.named_modules() if n.endswith("self_attn")]
    assert kinds[:3] == [MODELS[name][1]] * 3 and len(kinds) == 4 and kinds[3] != kinds[0]
    assert not any("vision" in name or "visual" in name for name, _ in model.named_parameters())
    gib = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
    assert gib < 30, "three sides beside each other have to fit on one H200"


@with_the_models
@pytest.mark.parametrize("words", [(), ("--flag",)], ids=["upstream", "flag"])
@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("glm_5_3_flash", "Glm5NextForConditionalGenerationNextN"),
        ("ling_3_tiny", "BailingMoeForCausalLMNextN"),
    ],
)
def test_a_models_own_layer_drafts(name: str, draft: str, words: tuple[str, ...]) -> None:
    """Kimi-K3's does not: sglang has no class of it."""
    from sglang.srt.configs.model_config import ModelConfig

    args = resolved(options(name, *words, "--drafts", "4", "--draft-layer"))
    found = SimpleNamespace(**args.resolved_dict())
    assert (found.speculative_algorithm, found.speculative_num_steps) == ("EAGLE", 4)
    assert (found.speculative_num_draft_tokens, found.max_running_requests) == (5, 64)
    assert found.mem_fraction_static == 0.45  # the rest is for what attention keeps
    place = found.speculative_draft_model_path
    config = ModelConfig.from_server_args(args, model_path=place, is_draft_model=True)
    assert config.hf_config.architectures == [draft] and config.num_nextn_predict_layers == 1


def test_a_step_in_a_graph_is_read_off_the_log() -> None:
    """As sglang writes it."""
    package = Path(inspect.getfile(importlib.import_module("sglang"))).parent / "srt"
    reporter = package / "managers" / "scheduler_components" / "metrics_reporter.py"
    text = reporter.read_text()
    assert '"cuda graph"' in text and 'f"#new-token: {prefill_stats.log_input_tokens}, "' in text
    assert 'f"{self._graph_backend_label}: {can_run_cuda_graph}, "' in text


def test_the_prefix_cache_can_be_emptied() -> None:
    from sglang.srt.managers.io_struct import FlushCacheReqOutput

    package = Path(inspect.getfile(importlib.import_module("sglang"))).parent / "srt"
    text = (package / "entrypoints" / "engine.py").read_text()
    assert "def flush_cache(self):" in text and "tokenizer_manager.flush_cache()" in text
    assert "success" in inspect.get_annotations(FlushCacheReqOutput)


@with_the_models
@pytest.mark.parametrize("model", dsv4_model.CONFIGS)
@pytest.mark.parametrize("side", [*SIDES, *MTP_SIDES])
def test_sglang_takes_the_small_deepseek(
    side: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments resolve to the same engine on both sides, but for what a side is."""
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    if side in MTP_SIDES and model != "v4":
        pytest.skip("V4.1's drafts come from another kind of model")
    for name, value in dsv4_sglang_side.switches("upstream").items():
        assert not name.startswith("SGLANG_") or hasattr(envs, name)
        monkeypatch.setenv(name, value)
    arguments = dsv4_sglang_side.engine_arguments(side, model, 8)
    assert set(arguments) <= set(inspect.signature(ServerArgs).parameters)
    args = ServerArgs(**arguments, device="cpu")
    args.resolve_once()
    found = SimpleNamespace(**args.resolved_dict())
    assert found.attention_backend == "dsv4" and found.page_size == 256
    assert getattr(args, "_kda_dsv4_requested", None) == ("dsv4" if "flag" in side else None)
    graphs = found.cuda_graph_config
    assert (graphs["decode"]["backend"] == "disabled") == side.endswith("eager")
    assert graphs["prefill"]["backend"] == "disabled" and not found.disable_radix_cache
    assert found.enable_decoder_swa_bounded_replay in (None, False)
    assert found.speculative_algorithm == ("EAGLE" if side in MTP_SIDES else None)
    assert found.chunked_prefill_size == BATCHED_TOKENS and found.moe_runner_backend == "triton"


@with_the_models
@pytest.mark.parametrize("model", dsv4_model.CONFIGS)
def test_sglang_builds_the_small_deepseek(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that the script draws, and compressed rows that it halves."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.models import deepseek_v4
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    from tests.engines.kda.sglang.harness import one_rank

    args = ServerArgs(**dsv4_sglang_side.engine_arguments("upstream", model, 64), device="cpu")
    args.resolve_once()
    publish(args, role="test")
    one_rank()
    config = ModelConfig.from_server_args(args)
    monkeypatch.setattr(deepseek_v4, "get_rope_wrapper", lambda **_: None)  # a compiled library's
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(loader, "initialize_dummy_weights", loader.initialize_dummy_weights)
    dsv4_sglang_plugin._draw(loader)
    alone = {"pp_rank": 0, "pp_size": 1, "moe_ep_rank": 0, "moe_tp_rank": 0}
    with get_parallel().override(**alone, moe_ep_size=1, moe_tp_size=1):
        torch.set_default_dtype(torch.bfloat16)
        built = deepseek_v4.DeepseekV4ForCausalLM(config=config.hf_config)
        torch.set_default_dtype(torch.float32)
    loader.initialize_dummy_weights(built)
    loader.post_load_weights(built)
    compressors = [
        (name, module)
        for name, module in built.named_modules()
        if type(module).__name__ in ("Compressor", "DeepseekV41Compressor")
    ]
    assert len(compressors) == dsv4_engine_sglang.COMPRESSORS[model]
    assert not built.lm_head.weight[dsv4_model.ANSWERS :].any()
    before = [module.norm.weight.clone() for _, module in compressors]
    dsv4_model.halve_rows(built)
    for (name, module), weight in zip(compressors, before, strict=True):
        factor = 1.0 if "indexer" in name else 0.5
        assert torch.equal(module.norm.weight, weight * factor) and weight.min() > 0.5


@with_the_models
def test_mhcs_sinkhorn_in_triton_is_that_of_sglangs_torch_form() -> None:
    import torch
    from sglang.kernels.ops.layernorm import mhc

    before = mhc.hc_split_sinkhorn
    dsv4_sglang_plugin._without_tilelang(mhc)
    split, mhc.hc_split_sinkhorn = mhc.hc_split_sinkhorn, before
    g = torch.Generator().manual_seed(0)
    x, fn = torch.randn(3, 4, 64, generator=g), torch.randn(24, 256, generator=g)
    scale, base = torch.rand(3, generator=g), torch.randn(24, generator=g)
    post, comb, _ = mhc._mhc_pre_torch(x, fn, scale, base, 1e-6, 1e-6, 1e-6, 2.0, 4)
    mixes = x.flatten(1) * torch.rsqrt(x.flatten(1).square().mean(-1, keepdim=True) + 1e-6)
    _, got_post, got_comb = split((mixes @ fn.T).unsqueeze(1), scale, base, 4, 4, 1e-6)
    torch.testing.assert_close(got_post.squeeze(1), post.squeeze(-1))
    torch.testing.assert_close(got_comb.squeeze(1), comb)


@with_the_models
def test_the_scheduler_calls_a_method_by_its_name() -> None:
    package = Path(inspect.getfile(importlib.import_module("sglang"))).parent / "srt"
    text = (package / "managers" / "scheduler.py").read_text()
    assert "getattr(self, recv_req.method)" in text and "func(**recv_req.parameters)" in text
    text = (package / "entrypoints" / "engine.py").read_text()
    assert "def collective_rpc(self, method: str, **kwargs):" in text
    text = (package / "managers" / "tokenizer_manager.py").read_text()
    for fact in ("cached_tokens", "output_top_logprobs", "spec_accept_length"):
        assert f'"{fact}"' in text


@with_the_models
@pytest.mark.parametrize("name", ["kimi_linear_rank_of_8", "kimi_k3"])
def test_upstream_has_the_flags_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models for which sglang chooses none by itself."""
    from sglang.srt.arg_groups.cuda_graph_hook import resolving_view
    from sglang.srt.model_executor import cuda_graph_config

    monkeypatch.setattr(sglang_prefill_graphs, "is_cuda", lambda: True)
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")
    for ranks in ("1", "8"):
        flag, upstream = (
            resolving_view(resolved(options(name, "--ranks", ranks, *words)))
            for words in (("--flag",), ("--variant", "upstream_graphs"))
        )
        assert flag.cuda_graph_config.prefill == upstream.cuda_graph_config.prefill
        assert flag.cuda_graph_config.prefill.backend == "breakable"


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
    assert found.tp_size == {"tp2": 2, "tp2_drafts": 2, "tp4": 4, "tp8": 8}.get(name, 1)
    assert found.tp_size == 1 or name not in recall_sglang.DEFAULT


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
