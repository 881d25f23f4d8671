"""What the benchmarks rely on in vLLM's own code."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import serve_vllm
from benchmarks.engines.serve_model import model_directory, with_dense_attention

CONFIGS = Path(serve_vllm.__file__).parent / "engines" / "configs"


def test_weights_are_drawn_by_a_loader_of_its_own() -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    serve_vllm.register_loader()
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(64, 64))
    get_model_loader(LoadConfig(load_format="drawn")).load_weights(model, None)
    assert 0.015 < model.weight.std().item() < 0.025


def test_the_scheduler_is_where_steps_are_logged() -> None:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore

    assert "self.scheduler.schedule(" in inspect.getsource(EngineCore.step)
    assert inspect.signature(LLM.reset_prefix_cache).return_annotation in ("bool", bool)
    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert "total_num_scheduled_tokens" in fields
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"attention_backend", "load_format", "max_num_seqs", "enable_prefix_caching"} <= known
    args = argparse.Namespace(
        turns=Path("turns"), variant=None, ranks=2, state="bfloat16", own_gpu=False, drafts=7
    )
    args.draft_layer = False
    assert set(serve_vllm.engine_arguments(args)) <= known


@pytest.mark.parametrize(
    ("name", "target", "draft"),
    [
        ("ling_3_tiny", "BailingMoeV3ForCausalLM", "BailingMoeV3MTPModel"),
        ("kimi_k3", "KimiLinearForCausalLM", "KimiK3MTPModel"),
        ("glm_5_3_flash", "Glm5NextForCausalLM", "Glm5NextMTPModel"),
    ],
)
def test_a_models_own_layer_drafts(name: str, target: str, draft: str) -> None:
    """Of the configurations that a side writes, as vLLM reads them."""
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    if "glm" in name and importlib.util.find_spec("torchvision") is None:
        pytest.skip("vLLM looks into GLM's class, whose package imports torchvision")
    found: list[argparse.Namespace] = []
    folder = ["--config", str(CONFIGS / name), "--layers", "4", "--drafts", "4", "--draft-layer"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_vllm, "run", lambda args: bool(found.append(args)))
        patch.setattr(sys, "argv", ["serve_vllm", "run", "side.json", *folder])
        assert serve_vllm.main() == 0
    arguments = EngineArgs(
        model=model_directory(found[0], only_text=True),
        skip_tokenizer_init=True,
        hf_overrides=with_dense_attention,
        **serve_vllm.engine_arguments(found[0]),
    )
    model = arguments.create_model_config()
    drafts = arguments.create_speculative_config(model, ParallelConfig())
    assert model.architectures == [target] and model.get_head_size() == 576
    assert drafts.draft_model_config.architectures == [draft] and drafts.method == "mtp"
    text = drafts.draft_model_config.hf_text_config
    assert (text.num_hidden_layers, text.num_nextn_predict_layers) == (4, 1)
    assert arguments.use_replayssm == (name == "kimi_k3")
    assert drafts.num_speculative_tokens == 4 and drafts.draft_model_config.get_head_size() == 576


def test_upstream_graphs_begin_with_vllms_own() -> None:
    """With the sizes that vLLM captures on Hopper without being told, up to 512."""
    from vllm.config import vllm as config

    source = " ".join(inspect.getsource(config.VllmConfig._set_cudagraph_sizes).split())
    assert "i for i in [1, 2, 4] if i <= max_cudagraph_capture_size" in source
    assert "range(8, min(max_cudagraph_capture_size + 1, 256), 8)" in source
    assert "range(256, max_cudagraph_capture_size + 1, 16)" in source
    assert (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) == serve_vllm.CAPTURED
