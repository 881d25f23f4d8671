from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backend_core import target as target_module
from backend_core.target import KNOWN_TARGETS, Target, detect_target


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU 1 that is the current device, beside a GPU 0; change its attributes at will."""
    gpu = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, name="NVIDIA H200", gcnArchName="unused"
    )
    other = SimpleNamespace(major=8, minor=0, multi_processor_count=108, name="NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: [other, gpu][index])
    monkeypatch.setattr(torch.version, "hip", None)
    target_module._detect_gpu.cache_clear()
    yield gpu
    target_module._detect_gpu.cache_clear()


def test_a_machine_without_gpu_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_target() == KNOWN_TARGETS["cpu"]
    assert detect_target(torch.device("cpu")).key == "cpu"


def test_the_current_nvidia_gpu(fake_gpu: SimpleNamespace) -> None:
    found = detect_target()
    assert found == Target("nvidia", "sm90", 132, "NVIDIA H200")
    assert found.key == KNOWN_TARGETS["H200"].key == "nvidia_sm90"
    assert detect_target(torch.device("cuda")) == found
    assert detect_target(torch.device("cuda:0")).arch == "sm80"
    assert detect_target(torch.device("cpu")) == KNOWN_TARGETS["cpu"]


def test_two_digit_compute_capability(fake_gpu: SimpleNamespace) -> None:
    fake_gpu.major, fake_gpu.minor = 10, 3
    assert detect_target().arch == "sm103"


def test_amd_architecture_is_without_feature_flags(
    fake_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.0")
    fake_gpu.gcnArchName, fake_gpu.multi_processor_count = "gfx942:sramecc+:xnack-", 304
    assert detect_target() == Target("amd", "gfx942", 304, "NVIDIA H200")


def test_detection_asks_the_device_once(
    fake_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = detect_target()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: None)
    assert detect_target() is first


def test_another_accelerator_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a CPU, CUDA or HIP device, got xpu:0"):
        detect_target(torch.device("xpu:0"))
