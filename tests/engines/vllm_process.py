"""Fixtures of the tests in vLLM, which their ``conftest.py`` files import, and what several use."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A distributed group of this process alone, as a worker has one; models are looked into here:
    for each of them vLLM would start a process that imports all of vLLM again."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry

    def inspect(model: Any) -> Any:
        return registry._ModelInfo.from_model_cls(model.load_model_cls())

    place = tmp_path_factory.mktemp("rendezvous") / "file"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
        initialize_model_parallel(1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry._LazyRegisteredModel, "inspect_model_cls", inspect)
        yield


@pytest.fixture
def model_dtype() -> Iterator[None]:
    """vLLM builds layers under the model's dtype."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def config_of(model: str | Path, family: str | None, **options: Any) -> Any:
    """The ``VllmConfig`` that vLLM makes of its arguments, under the flag of a family."""
    from vllm.engine.arg_utils import EngineArgs

    from backend_core.engines.vllm_flag import flag_name

    given = {"dtype": "bfloat16", "max_num_seqs": 8, "max_model_len": 1024, "enforce_eager": True}
    if family is not None:
        given["attention_backend"] = flag_name(family)
    given |= options
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True, **given)
    return arguments.create_engine_config()


def builder_of(layer: Any, config: Any, spec: Any = None) -> Any:
    """What builds the metadata of a layer whose cache has a group of its own.

    Args:
        spec: of the cache; by default the layer's.
    """
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        make = layer.get_attn_backend().get_builder_cls()
        spec = layer.get_kv_cache_spec(config) if spec is None else spec
        return make(spec, [layer.prefix], config, torch.device("cpu"))


@contextlib.contextmanager
def forward_pass(config: Any, attn_metadata: Any, tokens: int) -> Iterator[None]:
    """A pass of a model, as far as its layers see it."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with (
        torch.no_grad(),
        set_current_vllm_config(config),
        set_forward_context(attn_metadata, config, num_tokens=tokens),
    ):
        yield


def cuda_platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's CUDA platform with the capability of an H200; its libraries are not loaded."""
    stub = types.ModuleType("vllm._C_stable_libtorch")
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    monkeypatch.setattr(NonNvmlCudaPlatform, "get_device_capability", capability)
    platform = NonNvmlCudaPlatform()
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    return platform


def common_metadata(
    bounds: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    **other: Any,
) -> Any:
    """What vLLM's builders are given of a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    fields = {
        "query_start_loc": bounds,
        "query_start_loc_cpu": bounds.clone(),
        "seq_lens": seq_lens,
        "num_reqs": len(seq_lens),
        "num_actual_tokens": len(slots),
        "max_query_len": int(bounds.diff().max()),
        "max_seq_len": int(seq_lens.max()),
        "block_table_tensor": block_table,
        "slot_mapping": slots,
        "seq_lens_cpu_upper_bound": seq_lens.clone(),
    }
    return CommonAttentionMetadata(**{**fields, **other})
