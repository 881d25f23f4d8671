"""FLA's own function under the variable, with its wheel: what runs here, and what stays FLA's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import kda_backend
from kda_backend import fla_backend

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torch
from fla.ops.kda import chunk_kda

torch.manual_seed(0)
q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
g, beta = -torch.rand(1, 100, 2, 64), torch.rand(1, 100, 2)
bounds = torch.tensor([0, 30, 100])
try:
    o, state = chunk_kda(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True, cu_seqlens=bounds
    )
except Exception as error:
    print("FLA", type(error).__name__)
else:
    print("HERE", tuple(o.shape), tuple(state.shape), round(float(o.double().sum()), 6))
print("LOADED", "kda_backend.operators" in sys.modules)
"""


def output_of(setting: str | None) -> str:
    environment = {name: x for name, x in os.environ.items() if name != fla_backend.VARIABLE}
    if setting is not None:
        environment[fla_backend.VARIABLE] = setting
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_variable_runs_an_unchanged_script_here() -> None:
    out = output_of("1")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
    g, beta = -torch.rand(1, 100, 2, 64), torch.rand(1, 100, 2)
    o, state = kda_backend.chunk_kda(
        q, k, v, g, beta,
        use_qk_l2norm_in_kernel=True, output_final_state=True,
        cu_seqlens=torch.tensor([0, 30, 100]),
    )  # fmt: skip
    total = round(float(o.double().sum()), 6)
    assert state is not None
    assert f"HERE {tuple(o.shape)} {tuple(state.shape)} {total}" in out
    assert "chunk_kda -> kda_dsv4" in out


@pytest.mark.parametrize("setting", [None, "0"])
def test_without_it_nothing_changes(setting: str | None) -> None:
    out = output_of(setting)
    assert "kda_dsv4" not in out and "HERE" not in out and "LOADED False" in out


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ours, registered with FLA's function, as the variable asks."""
    from fla import backends
    from fla.ops import kda

    monkeypatch.setenv(fla_backend.VARIABLE, "1")
    fla_backend.autoload()
    (registry,) = (r for r in backends._function_registries.values() if "kda_dsv4" in r._backends)
    yield registry._backends["kda_dsv4"]
    assert registry._get_sorted_backends()[0].backend_type == "kda_dsv4"
    del registry._backends["kda_dsv4"]
    assert kda.chunk_kda is not kda_backend.chunk_kda


def inputs(**changes: Any) -> dict[str, Any]:
    q, k, v = (torch.randn(1, 70, 2, 64) for _ in range(3))
    call = {"q": q, "k": k, "v": v, "g": -torch.rand(1, 70, 2, 64), "beta": torch.rand(1, 70, 2)}
    return call | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": torch.randn(1, 70, 2, 64, requires_grad=True)}, "call it under torch.no_grad()"),
        ({"cp_context": object()}, "context parallelism is for training"),
        ({"new_option": 1}, "new_option"),
        ({"chunk_size": 16}, "either 32 or 64"),
        ({"v": torch.randn(1, 70, 2, 512)}, "512"),
        ({"use_gate_in_kernel": True}, "A_log must be given"),
        ({"q": torch.randn(1, 70, 2, 32)}, "k must have shape [1, 70, 2, 32], got [1, 70, 2, 64]"),
    ],
)
def test_what_is_not_served_stays_flas_and_is_named(
    backend: Any, changes: dict[str, Any], reason: str
) -> None:
    assert backend.is_available() and backend.is_enabled()
    call = inputs(**changes)
    accepted, why = backend.verify("chunk_kda", **call)
    assert not accepted and reason in why
    assert backend.verify("chunk_kda", *inputs().values()) == (True, None)


def test_a_call_that_is_declined_goes_to_the_next(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.backends.flash_kda import FlashKDABackend

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(FlashKDABackend, "is_available", lambda self=None: True)
    monkeypatch.setattr(FlashKDABackend, "verify", lambda self, name, **call: (True, None))
    monkeypatch.setattr(FlashKDABackend, "chunk_kda", lambda self, **call: calls.append(call))
    call = inputs(cp_context=object())
    assert chunk_kda(**call) is None and calls == [call]
    o, _ = chunk_kda(**inputs())
    assert o.shape == (1, 70, 2, 64) and len(calls) == 1


def test_another_fla_keeps_its_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fla.backends", ModuleType("fla.backends"))
    fla_backend.register(ModuleType("fla.ops.kda"))
    (line,) = caplog.messages
    assert line.startswith("kda-dsv4-backend could not register with FLA, whose own kernels run: ")
