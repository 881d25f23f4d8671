"""What is said to be missing, on a machine in a folder that has everything and then less."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend_core.engines import Engine
from benchmarks.engines import sglang_needs

FILES = (
    "sgl_kernel/sm90/common_ops.abi3.so",
    "sgl_kernel/flash_ops.abi3.so",
    "sglang/kernels/jit/csrc/elementwise/rope.cuh",
    "sglang/kernels/jit/include/sgl_kernel/utils.cuh",
    "cuda/bin/nvcc",
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything that is asked for; a test takes something away."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    has: dict[str, Any] = {
        "versions": {"sglang": "0.5.20"},
        "entry points": ["kda", "dsv4", "softmax"],
        "modules": ["sglang", "sgl_kernel", "tvm_ffi", "uvloop"],
        "programs": ["ninja", "c++"],
        "gpus": 1,
        "root": tmp_path,
    }

    def find_spec(name: str) -> Any:
        places = [str(tmp_path / name)]
        return (
            SimpleNamespace(submodule_search_locations=places) if name in has["modules"] else None
        )

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(Engine, "installed", lambda self: has["versions"].get(self.name))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: has["versions"][name])
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [SimpleNamespace(name=name) for name in has["entry points"]],
    )
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in has["programs"] else None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: has["gpus"])
    return has


LESS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "release": (lambda m: m["versions"].update(sglang="0.5.19"), "0.5.20 to 0.5.23, got 0.5.19"),
    "plug-in": (lambda m: m["entry points"].remove("dsv4"), "the entry points dsv4 of this"),
    "kernels": (lambda m: m["modules"].remove("sgl_kernel"), "got no sgl_kernel"),
    "library": (
        lambda m: (m["root"] / FILES[1]).unlink(),
        "sglang-kernel must have its library flash_ops",
    ),
    "sources": (lambda m: (m["root"] / FILES[2]).unlink(), "sources, got no *.cuh in"),
    "nvcc": (lambda m: (m["root"] / FILES[4]).unlink(), "with nvcc, got none on the path"),
    "ninja": (lambda m: m["programs"].remove("ninja"), "compiles kernels with ninja"),
    "module": (lambda m: m["modules"].remove("tvm_ffi"), "the module tvm_ffi must be importable"),
    "gpu": (lambda m: m.update(gpus=0), "torch must see 1 GPUs, got 0"),
}


@pytest.mark.parametrize("less", LESS)
def test_what_is_missing_is_said_in_a_sentence(less: str, machine: dict[str, Any]) -> None:
    wanted = (sglang_needs.FLASH_ATTENTION,)
    assert sglang_needs.missing(wanted) is None
    take, sentence = LESS[less]
    take(machine)
    found = sglang_needs.missing(wanted)
    assert found is not None and sentence in found
    with pytest.raises(SystemExit, match="not started: "):
        sglang_needs.require(wanted)


def test_a_newer_release_takes_the_newer_transformers(machine: dict[str, Any]) -> None:
    machine["versions"].update(sglang="0.5.20", transformers="5.17.0")
    assert sglang_needs.missing() is None
