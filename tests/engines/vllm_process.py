"""Fixtures of the tests in vLLM, which their ``conftest.py`` files import, and what several use."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A distributed group of this process alone, as a worker has one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    place = tmp_path_factory.mktemp("rendezvous") / "file"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield


@pytest.fixture
def model_dtype() -> Iterator[None]:
    """vLLM builds layers under the model's dtype."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


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
    """What vLLM's builders are given of a step, of the fields that this release has."""
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
        **other,
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{k: v for k, v in fields.items() if k in known})
