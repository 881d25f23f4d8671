"""The Hopper decode step on the CPU, from its own sources (tools/cuda_on_host), against float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.tables.load import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.decode_step import fused_sm90 as pipeline
from kda_backend.launch_params import TABLES
from kda_backend.testing.steps import StepPools, make_step
from tests.kda.cases import Backend, assert_same_bits, run_step
from tests.kda.test_decode_step import assert_rows
from tools.cuda_on_host.driver import GXX, HostKernel, run_launches
from tools.cuda_on_host.planted import plant

# one of each shape: how long the L2 cache keeps a state is nothing to a CPU
ROWS = {
    f"{row.params.split}x{row.params.warps}": row
    for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    if row.operator == "decode_step" and row.name == "fused_sm90"
}
pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]


def launch_on_host(
    monkeypatch: pytest.MonkeyPatch,
    step: type[pipeline.HopperStep],
    source: Path,
    run_seed: int | None,
) -> None:
    """Have a step launch the kernel of ``source`` on the host."""

    def kernel(path: pipeline.HopperStep, defines: dict[str, int]) -> HostKernel:
        clusters = {"cluster_size": defines["SPLIT"], "run_seed": run_seed}
        return HostKernel(source, path.source.stem, path.params, defines, **clusters)

    monkeypatch.setattr(step, "kernel", kernel)


def use_host(
    monkeypatch: pytest.MonkeyPatch, run_seed: int | None, source: Path = pipeline.SOURCE
) -> Backend:
    """Has the pipeline launch the kernel on the host."""

    launch_on_host(monkeypatch, pipeline.FusedStepSm90, source, run_seed)
    return Backend("kernels", torch.device("cpu"))


def check_step(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    row: Any,
    call: dict[str, Any],
    source: Path = pipeline.SOURCE,
) -> None:
    """Two live rows around a padded one."""
    cpu = use_host(monkeypatch, seed, source)
    model = dict(call)
    dtype = model.pop("pool", torch.float32)
    case = make_step(seed, 3, device=cpu.device, key_dim=128, value_dim=128, **model)
    pools = StepPools(case, 3, dtype=dtype)
    pools.fill(seed + 1, [2, 0])
    before = pools.copy()
    selection = cpu.selection(case.shape).with_path(dataclasses.replace(row, max_grid=None))
    out = run_step(cpu, case, pools, [2, -1, 0], selection=selection, pdl_prefetch_safe=True)
    assert_rows(case, out, [2, -1, 0], before, pools)


@pytest.mark.parametrize("shape", [min(ROWS), max(ROWS)])
def test_a_step_waits_for_the_launch_before(
    monkeypatch: pytest.MonkeyPatch, seed: int, shape: str
) -> None:
    """Two steps of the same states, the second placed while the first runs. Where the caller says
    that nobody writes what it reads before it waits, which is not so here, that is a race."""
    cpu = use_host(monkeypatch, None)
    case = make_step(seed, 1, device=cpu.device, key_dim=128, value_dim=128)
    pools = StepPools(case, 1, dtype=torch.float32)
    pools.fill(seed + 1, [0])
    before = pools.copy()
    row = dataclasses.replace(ROWS[shape], max_grid=None)

    def arguments(promise: bool) -> dict[str, Any]:
        # calls with one selection keep their kernel
        selection = cpu.selection(case.shape).with_path(row)
        return {"selection": selection, "pdl_prefetch_safe": promise}

    def steps(promise: bool) -> torch.Tensor:
        same = arguments(promise)
        kept = [run_step(cpu, case, pools, [0], **same) for _ in range(2)]
        run_launches(seed)
        return kept[0]

    out = steps(promise=False)
    middle = before.copy()
    monkeypatch.undo()
    use_host(monkeypatch, seed)
    same = arguments(promise=True)
    first = run_step(cpu, case, middle, [0], **same)
    run_step(cpu, case, middle, [0], **same)
    assert torch.equal(out, first) and torch.equal(pools.states, middle.states)
    monkeypatch.undo()
    use_host(monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"race: .*decode_s.* of decode_step.*nothing orders"):
        steps(promise=True)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"gate": "bounded", "has_norm": False, "dtype": torch.float16, "pool": torch.bfloat16},
        {
            **{"heads": 1, "value_heads": 2, "has_conv": False, "l2norm": False},
            "pool": torch.float16,
        },
    ],
    ids=["whole", "bounded, no norm, bf16 state", "grouped, no convolution, fp16 state"],
)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_of_the_table_on_the_host(
    monkeypatch: pytest.MonkeyPatch, seed: int, row: Any, call: dict[str, Any]
) -> None:
    """In each shape that the table chooses."""
    check_step(monkeypatch, seed, row, call)


def bits_of(row: Any, seed: int, cpu: Backend) -> tuple[torch.Tensor, ...]:
    model: dict[str, Any] = {"key_dim": 128, "value_dim": 128, "dtype": torch.float32}
    case = make_step(seed, 1, device=cpu.device, **model)
    pools = StepPools(case, 1, dtype=torch.float32)
    pools.fill(seed + 1, [0])
    selection = cpu.selection(case.shape).with_path(dataclasses.replace(row, max_grid=None))
    return run_step(cpu, case, pools, [0], selection=selection), pools.states, pools.windows


def test_bits_are_those_of_every_shape(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The number of rows in a step chooses the shape, and must not choose a row's bits."""
    cpu = use_host(monkeypatch, seed)
    first, *others = ROWS.values()
    want = bits_of(first, seed, cpu)
    for row in others:
        for what, got, same in zip(
            ("out", "state", "window"), bits_of(row, seed, cpu), want, strict=True
        ):
            assert_same_bits(f"{what} of {row.params}", got, same)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_a_rate_beyond_fp32(monkeypatch: pytest.MonkeyPatch, seed: int, gate: str) -> None:
    row = ROWS[min(ROWS)]
    check_step(monkeypatch, seed, row, {"regime": ("steep", "random"), "gate": gate})


PLANTED = {
    "a cluster arrival lost": (
        "    if (NEEDS_CLUSTER_SYNC) cluster_arrive_relaxed();",
        "    if (NEEDS_CLUSTER_SYNC && at.rank) cluster_arrive_relaxed();",
        r"cluster: decode_step\.cu:\d+ `if \(NEEDS_CLUSTER_SYNC\) cluster_wait\(\);` waits for the "
        r"cluster without having arrived",
    ),
    "a barrier's fence dropped": (
        "        fence_barrier_init();\n",
        "",
        r"missing barrier fence: decode_step\.cu:\d+ `store_shared_remote\(.*which decode_step\.cu:"
        r"\d+ `s\.norm_ready\.init\(1\);` initialises",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    right, wrong, report = PLANTED[mistake]
    folder = plant(pipeline.SOURCE.parent, tmp_path, pipeline.SOURCE.name, right, wrong)
    row = next(row for row in ROWS.values() if row.params.split > 1)
    with pytest.raises(RuntimeError, match=report):
        check_step(monkeypatch, seed, row, {}, folder / pipeline.SOURCE.name)
