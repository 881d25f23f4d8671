"""The Hopper prefill's faults on the GPU: a wait in vain ends, and two streams take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backend_core.target import detect_target
from kda_backend import StateRef, kda_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import select
from kda_backend.testing.cases import make_case
from tests.kda.cases import assert_result

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="the kernels are Hopper's"),
]
WITHOUT_INTRA = """
import torch
from backend_core.target import detect_target
from kda_backend import StateRef, kda_prefill
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.scratch import Scratch
from kda_backend.selection import select
from kda_backend.testing.cases import make_case

plain = pipeline.scan_defines
pipeline.scan_defines = lambda *args: plain(*args) | {"MAX_POLLS": 200_000}
case = make_case(1, (130,), key_dim=128, value_dim=128, device="cuda")
values = (*case.inputs, StateRef.functional(None, v_first=True), case.cu_seqlens)
arguments = {"scratch": Scratch(case.q.device)}
arguments["selection"] = select(detect_target(), case.shape)
kernel_call = pipeline.CudaKernel.__call__

def call(self, *args, **kwargs):
    if self._name != "intra_chunk":
        kernel_call(self, *args, **kwargs)

pipeline.CudaKernel.__call__ = call
kda_prefill(*values, **arguments)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("SYNCHRONISE", " ".join(str(error).split())[:200])
try:
    kda_prefill(*values, **arguments)
except RuntimeError as error:
    print("NEXT", " ".join(str(error).split())[:400])
"""


def test_a_scan_without_its_intra_stage_ends_and_says_why() -> None:
    """In a process of its own, whose context is lost."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_INTRA],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "SYNCHRONISE" in done.stdout, said[-3000:]
    assert "scan of KDA's prefill waited in vain for tile 0" in said, said[-3000:]


def test_two_streams_that_share_a_scratch_take_turns(seed: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    scratch, streams = Scratch(device), [torch.cuda.Stream() for _ in range(2)]
    cases = [
        make_case(seed + n, lengths, heads=4, key_dim=128, value_dim=128, device=device)
        for n, lengths in enumerate([(700, 65), (64, 900)])
    ]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                state = StateRef.functional(case.state, v_first=True, final=True)
                results.append(
                    kda_prefill(
                        *case.inputs,
                        state,
                        case.cu_seqlens,
                        scratch=scratch,
                        selection=select(detect_target(), case.shape),
                    )
                )
    torch.cuda.synchronize()
    for case, found in zip(cases, results, strict=True):
        assert_result(case, *found[:2])
