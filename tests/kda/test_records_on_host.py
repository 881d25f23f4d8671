"""The Hopper verification from records on the CPU, from its own sources (tools/cuda_on_host),
against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from backend_core.target import KNOWN_TARGETS
from kda_backend import kda_verify_step
from kda_backend.launch_params import TABLES
from kda_backend.selection import KdaSelection, KdaShape
from kda_backend.testing.regimes import HARD_REGIMES
from kda_backend.verify_records import fused_sm90 as pipeline
from tests.kda import test_records as records
from tests.kda.cases import Backend, assert_same_bits
from tests.kda.test_step_on_host import launch_on_host
from tools.cuda_on_host.driver import GXX, run_launches
from tools.cuda_on_host.planted import plant

ROWS = {
    row.params.split: dataclasses.replace(row, max_grid=None)
    for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    if row.operator == "verify_records" and row.name == "fused_sm90"
}
pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]


@dataclass(frozen=True)
class OnHost(Backend):
    """The backend whose selections have one row of the table."""

    row: Row

    def selection(self, shape: KdaShape) -> KdaSelection:
        return super().selection(shape).with_path(self.row)


def use_host(
    monkeypatch: pytest.MonkeyPatch,
    split: int,
    run_seed: int | None,
    source: Path = pipeline.SOURCE,
) -> OnHost:
    """Has the path launch the kernel on the host."""

    launch_on_host(monkeypatch, pipeline.FusedRecordsSm90, source, run_seed)
    return OnHost("kernels_128", torch.device("cpu"), ROWS[split])


CALLS: dict[str, dict[str, Any]] = {
    "rolling windows, a draft of eight": {"lengths": (8, 3), "accepted": ((5, 1), (8, 2), (1, 1))},
    "buffers, bounded, no norm, bf16 state": {
        **{"lengths": (2, 0, 5), "accepted": ((2, 0, 4), (0, 0, 1)), "rolls": False},
        **{"gate": "bounded", "has_norm": False, "state_dtype": torch.bfloat16},
    },
    "grouped, no convolution, fp16 state and tokens": {
        **{"lengths": (4,), "accepted": ((4,), (1,)), "value_heads": 2, "has_conv": False},
        **{"l2norm": False, "state_dtype": torch.float16, "dtype": torch.float16},
    },
    "fp32, more than two chunks": {
        **{"lengths": (19,), "accepted": ((18,), (3,)), "dtype": torch.float32},
        **{"rolls": False, "beta_kind": "twice_sigmoid"},
    },
    "more than a chunk, bf16 state": {
        **{"lengths": (9, 1), "accepted": ((9, 1), (9, 0)), "state_dtype": torch.bfloat16},
        **{"has_bias": False, "layout": "DS"},
    },
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("split", ROWS)
def test_rows_of_the_table_on_the_host(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: int, call: str
) -> None:
    """Steps of verify and accept."""
    options = dict(CALLS[call])
    lengths, accepted = options.pop("lengths"), options.pop("accepted")
    host = use_host(monkeypatch, split, seed)
    x = records.drafts(host, seed, lengths, steps=len(accepted), **options)
    for step, counts in enumerate(accepted):
        stored = list(x.states)
        out = records.verify(host, x, step, x.ints(x.held))
        x.expect(step)
        records.assert_step(x, step, out, stored)
        x.accept(counts)


@pytest.mark.parametrize("regime", HARD_REGIMES)
def test_gate_regimes(monkeypatch: pytest.MonkeyPatch, seed: int, regime: str) -> None:
    """Drafts of eight with as many records to fold: decays of 0, of nearly 1, and between them."""
    host = use_host(monkeypatch, 4, seed)
    x = records.drafts(host, seed, (8,), steps=2, has_conv=False, has_norm=False, regime=(regime,))
    for step in range(2):
        stored = list(x.states)
        out = records.verify(host, x, step, x.ints(x.held))
        x.expect(step)
        records.assert_step(x, step, out, stored)
        x.accept([8])


@pytest.mark.parametrize(
    "check",
    [
        records.test_padding_and_rows_that_keep_nothing,
        records.test_corrections_for_keys_behind_their_norm,
        lambda host, seed: records.test_wild_counts_stay_in_the_records(host, seed, 1 << 30),
    ],
    ids=["padding", "keys behind their norm", "a wild count"],
)
def test_what_other_rows_are_tested_for(
    monkeypatch: pytest.MonkeyPatch, seed: int, check: Callable[[Backend, int], None]
) -> None:
    check(use_host(monkeypatch, 2, seed), seed)


def test_bits_are_those_of_every_shape(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The number of sequences chooses the row, and must not choose a sequence's bits. Nor must the
    number of its tokens those of an earlier one."""
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for split in ROWS:
        host = use_host(monkeypatch, split, seed)
        for length in (8, 3):
            x = records.drafts(host, seed, (8,), steps=2, dtype=torch.float32)
            records.verify(host, x, 0, None)
            x.lengths = (length,)
            part = x.case.part(slice(8, 8 + length))
            selection = host.selection(x.case.shape)
            draft = x.draft(x.ints([5]))
            stages = part.stages(x.pools.windows)
            out = kda_verify_step(*part.inputs, x.state(), draft, selection=selection, **stages)
            kept = [y[x.rows[0], :, :3] for y in x.records[:2]]
            found[split, length] = [out[:3], x.pools.states[x.slots[0]], *kept]
    first = found.pop((1, 8))
    for where, tensors in found.items():
        for what, got, want in zip(("out", "state", "u", "keys"), tensors, first, strict=True):
            assert_same_bits(f"{what} of split and length {where}", got, want)


def test_a_draft_waits_for_the_launch_before(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two steps of the same states, the second placed while the first runs."""
    found = []
    for run_seed in (seed, None):
        host = use_host(monkeypatch, 4, run_seed)
        x = records.drafts(host, seed, (3,), steps=2)
        counts = x.ints([0]), x.ints([2])
        outs = [records.verify(host, x, step, counts[step]) for step in range(2)]
        if run_seed is None:
            run_launches(seed)
        found.append([*outs, x.pools.states[x.slots[0]], *x.records[:2]])
    for got, want in zip(found[1], found[0], strict=True):
        assert_same_bits("step", got, want)


PLANTED = {
    "the launch before is not waited for": (
        "    wait_on_dependent_grids();\n",
        "",
        r"race: .*verify_.* of verify_records.*nothing orders",
    ),
    "windows and records are written before all have read them": (
        "    if (SPLIT > 1 && first == 0) cluster_wait();\n    inputs.store_tokens("
        "p, own, at, draft, first, chunk.tokens);\n",
        "    inputs.store_tokens(p, own, at, draft, first, chunk.tokens);\n"
        "    if (SPLIT > 1 && first == 0) cluster_wait();\n",
        r"race: step_elements\.cuh:\d+ .* writes byte \d+ of conv_state\.ptr .*nothing orders",
    ),
    "the chunks of a cluster do not meet": (
        "            cluster_sync();\n",
        "            __syncthreads();\n",
        r"race: verify_rows\.cuh:\d+ `.*store_shared_remote.*nothing orders",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    right, wrong, report = PLANTED[mistake]
    folder = plant(pipeline.SOURCE.parent, tmp_path, pipeline.SOURCE.name, right, wrong)
    host = use_host(monkeypatch, 2, None, folder / pipeline.SOURCE.name)
    length = 17 if "chunks" in mistake else 2
    x = records.drafts(host, seed, (length,), steps=2)
    for step, count in enumerate((0, 2)):
        records.verify(host, x, step, x.ints([count]))
    with pytest.raises(RuntimeError, match=report):
        run_launches(seed)


def test_what_it_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Before anything is written: states that are not on 16 bytes, and tokens that lie too far
    apart for 32 bits."""
    host = use_host(monkeypatch, 1, seed)
    x = records.drafts(host, seed, (1,), steps=1, has_conv=False)
    memory, states = x.pools.memory.clone(), x.pools.states
    x.pools.states = x.pools.memory.as_strided(states.shape, states.stride(), 1)
    with pytest.raises(ValueError, match=r"slots .* multiples of 16 bytes .* aligned_state=False"):
        records.verify(host, x, 0, None)
    x.pools.states = states
    g = x.case.g.as_strided(x.case.g.shape, (1 << 27, 128, 1))
    x.case = dataclasses.replace(x.case, g=g)
    with pytest.raises(ValueError, match=r"g must have a stride below 134217728 .*, got 134217728"):
        records.verify(host, x, 0, None)
    assert_same_bits("states", x.pools.memory, memory)
