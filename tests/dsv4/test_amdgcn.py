"""The one-wave kernels' own AMD instructions, executed lane by lane, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from dsv4_backend import SeqLens
from dsv4_backend.compressor.bound import BoundLaunch
from dsv4_backend.compressor.in_place import in_torch
from dsv4_backend.compressor.variants import decode_variant
from dsv4_backend.selection import decode_selection
from tests.dsv4.cases import DEVICE, make_spec
from tests.dsv4.test_decode import check, prepare
from tests.dsv4.wave64 import Memory, Wave

ROOT = Path(__file__).parents[2]
EPS = 1e-6


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Text of the one-wave cases, compiled in a process without Triton's interpreter."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment.pop("TRITON_INTERPRET", None)
    script = ROOT / "tests" / "dsv4" / "compile_report.py"
    command = [sys.executable, str(script), request.param, "in_place", "decode indexer"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def execute(text: str, memory: Memory, workgroups: int, arguments: Sequence[object]) -> None:
    """Run the kernel on CPU tensors, which it reads and writes where they are."""
    addresses: dict[int, int] = {}
    values: list[int | float] = []
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            values.append(argument)  # type: ignore[arg-type]
            continue
        storage = argument.untyped_storage()
        if storage.data_ptr() not in addresses:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload]
            addresses[storage.data_ptr()] = memory.add(data)
        base = addresses[storage.data_ptr()]
        values.append(base + argument.data_ptr() - storage.data_ptr())
    wave = Wave(text, memory)
    for workgroup in range(workgroups):
        wave.run(workgroup, values)


def run_in_place(text: str, head_dim: int, dtype: str) -> None:
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    g = torch.Generator().manual_seed(head_dim)
    kv = torch.randn(3, head_dim + 16, generator=g).to(torch_dtype)
    weight = (0.5 + torch.rand(head_dim, generator=g)).to(torch_dtype)
    angle = 6.3 * torch.rand(64, 32, generator=g)
    table = torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
    seq_lens = SeqLens(torch.tensor([60, -1, 4]).int()).seq_lens

    memory = Memory()
    before = [t.clone() for t in (kv, weight, table, seq_lens)]
    execute(text, memory, len(seq_lens), [kv, weight, table, seq_lens, EPS, kv.stride(0), 64])

    want = before[0].clone()
    rotate = head_dim == 128
    in_torch(want[:, :head_dim], weight, EPS, table, seq_lens, compress_ratio=4, rotate=rotate)
    assert torch.equal(kv[:, head_dim:], before[0][:, head_dim:])
    tolerance = {"rtol": 0.0, "atol": 4e-6} if dtype == "fp32" else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(kv.float(), want.float(), **tolerance)
    assert not torch.equal(kv[0], before[0][0])
    for tensor, original in zip((weight, table, seq_lens), before[1:], strict=True):
        assert torch.equal(tensor, original)


@pytest.mark.parametrize("large", ["", ", over 2 GiB"])
@pytest.mark.parametrize("head_dim, dtype", [(128, "fp32"), (128, "bf16"), (512, "fp32")])
def test_in_place(assembly: dict[str, str], head_dim: int, dtype: str, large: str):
    run_in_place(assembly[f"in_place {head_dim} {dtype}{large}"], head_dim, dtype)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the cases' tensors are on the GPU")
@pytest.mark.parametrize("large", ["", ", over 2 GiB"])
@pytest.mark.parametrize(
    "cache_format, layout, rounding",
    [
        ("indexer_fp8", "ring", "sglang"),
        ("indexer_fp8", "paged", "vllm"),
        ("indexer_mxfp4", "paged", "vllm"),
    ],
)
def test_decode_step(
    assembly: dict[str, str], cache_format: str, layout: str, rounding: str, large: str
) -> None:
    spec = make_spec(cache_format, rounding=rounding, page_tokens=64)
    layer, engine, histories, entries, kv_score = prepare(spec, layout, seed=14)
    before = engine.state.clone()
    plan = engine.decode_plan(entries)
    call = engine.call(layer, kv_score)
    path = decode_selection(KNOWN_TARGETS["MI355X"], spec).lookup(1)
    bound = BoundLaunch(decode_variant(path, spec, layout, 4, False), call, plan)
    arguments = [x for x in bound.in_order(call, plan) if x is not None]
    text = assembly[f"decode {cache_format} c4 {layout}{large}"]
    execute(text, Memory(), plan.num_tokens, arguments)
    check(layer, engine, histories, entries, before)


def test_a_wrong_lane_movement_is_seen(assembly: dict[str, str]) -> None:
    text = assembly["in_place 128 fp32"]
    wrong = text.replace("quad_perm:[1,0,3,2]", "quad_perm:[0,1,2,3]")
    assert wrong != text
    with pytest.raises(AssertionError, match="not close"):
        run_in_place(wrong, 128, "fp32")
