"""How a call of the Hopper path shares the multiprocessors."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.contract.inputs import BETA_SIGMOID, GATE_LOG, KdaInputs, StateInputs
from kda_backend.kernels.chunk_table import ChunkTable
from kda_backend.prefill import two_stage_sm90 as prefill_sm90
from kda_backend.prefill.sm_schedule import Costs, Work, costs_of, lay_out
from kda_backend.scratch import Workspace
from kda_backend.step_plan import build_metadata


def shipped_costs(num_sms: int) -> list[Costs]:
    rows = load_table("kda", KNOWN_TARGETS["H200"]).rows
    found = {costs_of(row.params, num_sms) for row in rows if row.name == "two_stage_sm90"}
    assert found and all(costs.intra for costs in found)
    return sorted(found)


@pytest.mark.parametrize("num_sms", [132, 114, 78])
def test_every_tile_has_a_maker_and_every_scan_block_a_place(num_sms: int) -> None:
    for costs, heads, sequences, chunks in itertools.product(
        shipped_costs(num_sms), (1, 2, 4, 8, 16, 32, 96), (1, 3, 8, 64), (0, 1, 2, 8, 31, 128, 2048)
    ):
        tasks, tiles = heads * sequences, heads * sequences * chunks
        layout = lay_out(costs, Work(tiles, tasks, chunks, tasks))
        scan = next(scan for scan in costs.scan if scan.split == layout.split)
        assert layout.scan_blocks == (4 * tasks if layout.split else min(tasks, num_sms))
        assert 0 < layout.first_scan_sm <= num_sms
        left_to_the_scan = num_sms - layout.first_scan_sm
        assert left_to_the_scan <= layout.scan_blocks
        assert layout.limit >= 0
        # one wave: hardware spreads it evenly, and every block is there before the scan may start
        assert layout.intra_blocks in (num_sms, num_sms * layout.per_sm)
        if left_to_the_scan:  # and the tiles made beside it do not wait for a handful of makers
            beside = tiles - layout.limit * layout.intra_blocks
            tile_ns = next(c.tile_ns for c in costs.intra if c.blocks == layout.per_sm)
            waves = -(-tasks * scan.blocks // num_sms)
            one_after_the_other = tiles * tile_ns / num_sms + waves * scan.task_ns(chunks)
            assert beside * tile_ns / layout.first_scan_sm <= 1.2 * one_after_the_other


@pytest.mark.parametrize("heads", [4, 8, 16, 32])
def test_few_long_sequences_are_scanned_beside_the_tiles(heads: int) -> None:
    layout = lay_out(shipped_costs(132)[-1], Work(heads * 512, heads, 512, heads))
    assert layout.first_scan_sm == 132 - heads * (4 if layout.split else 1)


def test_few_long_tasks_are_split_and_many_are_not() -> None:
    costs = shipped_costs(132)[-1]
    assert lay_out(costs, Work(4 * 512, 4, 512, 4)).split
    assert not lay_out(costs, Work(32 * 512, 32, 512, 32)).split


def test_of_many_equal_sequences_one_comes_after_the_other() -> None:
    layout = lay_out(shipped_costs(132)[-1], Work(32 * 64 * 4, 32 * 64, 4, 32 * 64))
    assert layout.in_turn and layout.scan_blocks == 132


@pytest.mark.parametrize("heads", [4, 32])
def test_a_long_sequence_among_short_ones_is_scanned_beside_the_tiles(heads: int) -> None:
    chunks = 512 + 31 * 4
    layout = lay_out(shipped_costs(132)[-1], Work(heads * chunks, heads * 32, 512, heads))
    assert layout.first_scan_sm < 132


def test_a_scan_that_cannot_be_launched_leaves_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the intra stage has counted by then, the next call starts from zero."""
    workspace = Workspace(torch.device("cpu"))

    def intra(*_: object) -> None:
        workspace.flags().fill_(7)

    def scan(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    costs = shipped_costs(132)[-1]
    model = SimpleNamespace(intra=defaultdict(lambda: intra), scan=(scan, scan), costs=costs)
    monkeypatch.setattr(prefill_sm90, "_model", lambda *_: model)
    tokens = torch.zeros(1, 70, 2, 128, dtype=torch.bfloat16)
    x = KdaInputs(
        tokens, tokens, tokens, tokens, tokens[..., 0], None, None,
        GATE_LOG, 0.0, BETA_SIGMOID, True, 1.0,
    )  # fmt: skip
    offsets = torch.tensor([0, 70], dtype=torch.int32)
    meta = build_metadata(offsets, 70, chunk_table=False)
    empty = torch.zeros(4, dtype=torch.int32)
    meta = dataclasses.replace(meta, chunk_table=ChunkTable(*(empty,) * 6))
    path: Any = None
    with pytest.raises(RuntimeError, match="out of memory"):
        prefill_sm90.two_stage_sm90(
            path, x, meta, StateInputs(None, None, 2, 3), tokens.clone(), None, workspace
        )
    assert workspace.flags().numel() and not workspace.flags().any()


def test_no_sequences_launch_nothing() -> None:
    """Intra blocks count themselves in the workspace, and only the scan takes that back."""
    nothing = build_metadata(torch.zeros(1, dtype=torch.int32), 0, chunk_table=False)
    untouched: Any = None  # whatever is looked at raises
    prefill_sm90.two_stage_sm90(
        untouched, untouched, nothing, untouched, untouched, None, untouched
    )
