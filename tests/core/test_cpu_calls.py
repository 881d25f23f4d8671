"""A compiled kernel never gets a CPU tensor: the call is refused before anything is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backend_core import contracts
from backend_core.contracts import expect_kernel_device

ROOT = Path(__file__).parents[2]
READ = "must be on a GPU for kernels to read (on a CPU: with TRITON_INTERPRET=1), got cpu"
OF_ANOTHER = "ValueError: selection must be for a CPU, got one for H200"
REFUSALS = {
    "build_step_plan": f"ValueError: cu_seqlens of a plan with a chunk table {READ}",
    "kda_prefill": OF_ANOTHER,
    "kda_recurrent": OF_ANOTHER,
    "kda_decode_step": OF_ANOTHER,
    "MlaPlanner.plan": f"ValueError: lengths {READ}",
    "MlaPlanner.plan, shared prefixes": f"ValueError: lengths {READ}",
    "MlaPlanner.plan, sm90": f"ValueError: lengths {READ}",
    "mla_decode": f"ValueError: q_latent {READ}",
    "mla_decode, sm90": f"ValueError: q_latent {READ}",
    "sparse_mla": f"ValueError: q {READ}",
    "sparse_mla, gluon": f"ValueError: q {READ}",
    "block_sparse_attention": f"ValueError: q {READ}",
    "quantised_attention": f"ValueError: q {READ}",
    "predicted_attention": f"ValueError: q {READ}",
    "predict": f"ValueError: q {READ}",
    "compress_decode_": f"ValueError: kv_score {READ}",
    "compress_prefill_": f"ValueError: kv_score {READ}",
    "warm_up": f"ValueError: kv_score {READ}",
    "compress_norm_rope_hadamard_": f"ValueError: kv {READ}",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, bool]]:
    """Of each call what it raised, and whether its outputs are untouched."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.core.cpu_calls"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = {name: tuple(value) for name, value in json.loads(run.stdout).items()}
    assert found.keys() == REFUSALS.keys()
    return found


@pytest.mark.parametrize("name", REFUSALS)
def test_kernels_for_cpu_tensors_are_refused(
    name: str, outcomes: dict[str, tuple[str, bool]]
) -> None:
    assert outcomes[name] == (REFUSALS[name], True)


def test_the_interpreter_reads_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, device="cpu")
    monkeypatch.setattr(contracts, "interprets", lambda: True)
    expect_kernel_device("x", x)
    monkeypatch.setattr(contracts, "interprets", lambda: False)
    with pytest.raises(ValueError) as error:
        expect_kernel_device("x", x)
    assert str(error.value) == f"x {READ}"
