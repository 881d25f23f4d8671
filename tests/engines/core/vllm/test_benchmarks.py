"""What the benchmarks rely on in vLLM's own code."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from pathlib import Path

import torch

from benchmarks import serve_vllm


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
    assert set(serve_vllm.engine_arguments(args)) <= known


def test_upstream_graphs_begin_with_vllms_own() -> None:
    """With the sizes that vLLM captures on Hopper without being told, up to 512."""
    from vllm.config import vllm as config

    source = " ".join(inspect.getsource(config.VllmConfig._set_cudagraph_sizes).split())
    assert "i for i in [1, 2, 4] if i <= max_cudagraph_capture_size" in source
    assert "range(8, min(max_cudagraph_capture_size + 1, 256), 8)" in source
    assert "range(256, max_cudagraph_capture_size + 1, 16)" in source
    assert (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) == serve_vllm.CAPTURED
