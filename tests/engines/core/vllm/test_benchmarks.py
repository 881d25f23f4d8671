"""What the benchmarks rely on in vLLM's own code."""

from __future__ import annotations

import dataclasses
import inspect

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
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore

    assert "self.scheduler.schedule(" in inspect.getsource(EngineCore.step)
    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert "total_num_scheduled_tokens" in fields
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"attention_backend", "load_format", "max_num_seqs", "enable_prefix_caching"} <= known
