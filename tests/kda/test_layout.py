"""How a call of the Hopper path shares the multiprocessors."""

from __future__ import annotations

import itertools

import pytest

from backend_core.path_table import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.prefill_sm90 import Costs, lay_out


def costs_of(num_sms: int) -> list[Costs]:
    rows = load_table("kda", KNOWN_TARGETS["H200"]).rows
    names = [name for name in Costs._fields if name != "num_sms"]
    return [
        Costs(num_sms, *(int(row.params[name]) for name in names))
        for row in rows
        if row.name == "two_stage_sm90"
    ]


@pytest.mark.parametrize("num_sms", [132, 114, 78])
def test_every_tile_has_a_maker_and_every_scan_block_a_place(num_sms: int) -> None:
    for costs, heads, sequences, chunks in itertools.product(
        costs_of(num_sms), (1, 2, 4, 8, 16, 32, 96), (1, 3, 8, 64), (0, 1, 2, 8, 31, 128, 2048)
    ):
        tasks, tiles = 2 * heads * sequences, heads * sequences * chunks
        layout = lay_out(costs, tiles, tasks, chunks)
        assert layout.scan_blocks == tasks * (2 if layout.split else 1)
        assert 0 < layout.first_scan_sm <= num_sms
        left_to_the_scan = num_sms - layout.first_scan_sm
        assert left_to_the_scan in (0, layout.scan_blocks)
        assert layout.limit >= 0
        # one wave: hardware spreads it evenly, and every block is there before the scan may start
        assert layout.intra_blocks in (num_sms, num_sms * costs.intra_min_blocks)
        if left_to_the_scan:  # and the tiles made beside it do not wait for a handful of makers
            beside = tiles - layout.limit * layout.intra_blocks
            scan_ns = costs.scan_start_ns + chunks * costs.scan_step_ns
            one_after_the_other = tiles * costs.tile_ns / num_sms + scan_ns
            assert beside * costs.tile_ns / layout.first_scan_sm <= 1.2 * one_after_the_other


def test_few_long_sequences_are_scanned_beside_the_tiles() -> None:
    costs = costs_of(132)[-1]
    for heads in (4, 8, 16, 32):
        assert lay_out(costs, heads * 512, 2 * heads, 512).first_scan_sm < 132


def test_many_sequences_are_scanned_behind_the_tiles() -> None:
    assert lay_out(costs_of(132)[-1], 32 * 8 * 16, 2 * 32 * 8, 16).first_scan_sm == 132
