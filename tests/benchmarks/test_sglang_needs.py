"""What is said to be missing, on a machine in a folder that has everything and then less."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engines import sglang_needs

FILES = ("sgl_kernel/sm90/common_ops.abi3.so", "sgl_kernel/flash_ops.abi3.so")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything that is asked for; a test takes something away."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    has: dict[str, Any] = {
        "modules": ["sglang", "sgl_kernel", "tvm_ffi", "uvloop"],
        "gpus": 1,
        "root": tmp_path,
    }

    def find_spec(name: str) -> Any:
        places = [str(tmp_path / name)]
        return (
            SimpleNamespace(submodule_search_locations=places) if name in has["modules"] else None
        )

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: has["gpus"])
    return has


LESS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "kernels": (lambda m: m["modules"].remove("sgl_kernel"), "got no sgl_kernel"),
    "library": (
        lambda m: (m["root"] / FILES[1]).unlink(),
        "sglang-kernel must have its library flash_ops",
    ),
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
