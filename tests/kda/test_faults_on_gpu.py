"""The Hopper prefill's faults on the GPU: a wait in vain ends, and two streams take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backend_core.target import detect_target
from kda_backend import chunk_kda
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
from kda_backend import chunk_kda
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.scratch import Scratch
from kda_backend.selection import select
from kda_backend.testing.cases import make_case

plain = pipeline.scan_defines
pipeline.scan_defines = lambda *args: plain(*args) | {"MAX_POLLS": 200_000}
case = make_case(1, (130,), key_dim=128, value_dim=128, device="cuda")
arguments = case.options() | {"cu_seqlens": case.cu_seqlens, "scratch": Scratch(case.q.device)}
arguments["selection"] = select(detect_target(), case.shape)
kernel_call = pipeline.CudaKernel.__call__

def call(self, *args, **kwargs):
    if self._name != "intra_chunk":
        kernel_call(self, *args, **kwargs)

pipeline.CudaKernel.__call__ = call
chunk_kda(*case.tokens, **arguments)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("SYNCHRONISE", " ".join(str(error).split())[:200])
try:
    chunk_kda(*case.tokens, **arguments)
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
                results.append(
                    chunk_kda(
                        *case.tokens,
                        **case.options(),
                        cu_seqlens=case.cu_seqlens,
                        initial_state=case.state,
                        output_final_state=True,
                        state_v_first=True,
                        scratch=scratch,
                        selection=select(detect_target(), case.shape),
                    )
                )
    torch.cuda.synchronize()
    for case, (o, state) in zip(cases, results, strict=True):
        assert_result(case, o, state)
