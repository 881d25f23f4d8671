"""Prefill: chunks cut anywhere give the caches of the whole sequence, and those of decode."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_backend import compress_decode_, compress_prefill_, reference, window_ends
from dsv4_backend.compressor.torch_step import step
from tests.bounds import checked
from tests.dsv4.cases import (
    DEVICE,
    TARGET,
    Chunk,
    Engine,
    assert_records,
    expected_rows,
    make_history,
    make_layer,
    make_spec,
)

LAYOUTS = ["ring", "paged"]


def serve(
    layer, engine, histories, calls: list[list[Chunk]], input_dtype=torch.float32, torch_path=False
):
    for chunks in calls:
        kv_score = torch.cat([histories[r][start:end] for r, start, end in chunks])
        plan = engine.prefill_plan(chunks)
        kv_score = kv_score.to(input_dtype)
        if torch_path:
            step(engine.call(layer, kv_score), plan)
        else:
            compress_prefill_(layer, kv_score, engine.state, engine.cache, plan, target=TARGET)


def wanted(layer, engine, histories, lengths):
    rows = {}
    for request, length in enumerate(lengths):
        for i, row in enumerate(expected_rows(layer, histories[request][:length])):
            rows[engine.slot(request, (i + 1) * layer.spec.compress_ratio)] = row
    return rows


def make(cache_format: str, ratio: int, layout: str, lengths: list[int], seed: int):
    spec = make_spec(cache_format, ratio)
    layer, engine = make_layer(spec, seed), Engine(layout, spec, lengths)
    return layer, engine, [make_history(spec, n, seed + r) for r, n in enumerate(lengths)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "indexer_fp8"])
def test_c4_chunks(cache_format: str, layout: str) -> None:
    lengths = [19, 8, 3]
    layer, engine, histories = make(cache_format, 4, layout, lengths, 20)
    calls = [
        [(0, 0, 6), (1, 0, 4)],  # request 0 in the middle of a window
        [(2, 0, 3), (0, 6, 7)],
        [(0, 7, 16), (1, 4, 8)],
        [(0, 16, 19)],
    ]
    serve(layer, engine, histories, calls)
    assert_records(engine, layer, wanted(layer, engine, histories, lengths))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c128_chunks(layout: str) -> None:
    lengths = [257, 130]
    layer, engine, histories = make("fp8_ds_mla", 128, layout, lengths, 30)
    calls = [[(0, 0, 100), (1, 0, 128)], [(0, 100, 256), (1, 128, 130)], [(0, 256, 257)]]
    serve(layer, engine, histories, calls)
    assert_records(engine, layer, wanted(layer, engine, histories, lengths))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ratio", [4, 128])
def test_the_torch_path_is_the_definition(ratio: int, layout: str) -> None:
    lengths = [2 * ratio + 3, ratio]
    layer, engine, histories = make("fp8_ds_mla", ratio, layout, lengths, 40)
    calls = [[(0, 0, ratio + 2), (1, 0, ratio - 1)], [(1, ratio - 1, ratio)]]
    calls.append([(0, ratio + 2, 2 * ratio + 3)])
    serve(layer, engine, histories, calls, torch_path=True)
    assert_records(engine, layer, wanted(layer, engine, histories, lengths))


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "indexer_fp8"])
def test_the_torch_path_asks_for_no_default_device(cache_format: str) -> None:
    """Nor does it keep what it made on one."""
    layer, engine, histories = make(cache_format, 4, "paged", [9], 41)
    reference.places.cache_clear()
    with torch.device("meta"):
        serve(layer, engine, histories, [[(0, 0, 5)]], torch_path=True)
    serve(layer, engine, histories, [[(0, 5, 9)]], torch_path=True)
    assert_records(engine, layer, wanted(layer, engine, histories, [9]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [1, 4, 7, 8])
def test_decode_equals_prefill(split: int, layout: str) -> None:
    lengths = [13]
    layer, whole, histories = make("indexer_fp8", 4, layout, lengths, 50)
    stepped = Engine(layout, layer.spec, lengths)
    serve(layer, whole, histories, [[(0, 0, 13)]])
    serve(layer, stepped, histories, [[(0, 0, split)]])
    for position in range(split, 13):
        plan = stepped.decode_plan([(0, position + 1)])
        row = histories[0][position : position + 1]
        compress_decode_(layer, row, stepped.state, stepped.cache, plan, target=TARGET)
    assert torch.equal(stepped.cache, whole.cache)
    for position in range(8, 13):  # what later windows will read
        at = whole.locate(0, position)
        assert torch.equal(stepped.state[at], whole.state[at])


def test_bf16_input() -> None:
    layer, engine, histories = make("indexer_mxfp4", 4, "paged", [9], 60)
    serve(layer, engine, histories, [[(0, 0, 5)], [(0, 5, 9)]], input_dtype=torch.bfloat16)
    assert_records(engine, layer, wanted(layer, engine, histories, [9]))


@pytest.mark.parametrize("ratio", [4, 128])
def test_window_ends(ratio: int) -> None:
    starts_and_lengths = [(0, 1), (ratio - 1, 1), (3, 3 * ratio), (2 * ratio, ratio), (5, 2)]
    positions = torch.cat([torch.arange(s, s + n) for s, n in starts_and_lengths] + [torch.ones(3)])
    positions = positions.long().to(DEVICE)
    slots = torch.arange(positions.shape[0], device=DEVICE)
    slots[-3:] = -1
    positions[-3:] = ratio - 1  # padding keeps stale positions
    ends = window_ends(positions, slots, len(starts_and_lengths), ratio)
    want = [t for t in range(len(slots) - 3) if (int(positions[t]) + 1) % ratio == 0]
    assert ends.shape == (positions.shape[0] // ratio + 5,)
    assert ends.tolist() == want + [-1] * (ends.shape[0] - len(want))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, 20), max_size=5), layout=st.sampled_from(LAYOUTS))
def test_any_cuts_give_the_same_bytes(cuts: set[int], layout: str) -> None:
    layer, whole, histories = make("indexer_fp8", 4, layout, [21], 70)
    cut = Engine(layout, layer.spec, [21])
    edges = [0, *sorted(cuts), 21]
    serve(layer, whole, histories, [[(0, 0, 21)]])
    serve(layer, cut, histories, [[(0, a, b)] for a, b in itertools.pairwise(edges)])
    assert torch.equal(cut.cache, whole.cache)


@pytest.mark.interpreter
@pytest.mark.parametrize("position", [0, 2**31 - 1, 2**40])
def test_padding_has_any_position_from_0(position: int) -> None:
    """No byte outside of the tensors is read for a token without a state row."""
    layer, engine, (history,) = make("indexer_fp8", 4, "paged", [8], 5)
    plan = engine.prefill_plan([(0, 0, 8)])
    padded = {
        name: torch.cat([getattr(plan, name), getattr(plan, name).new_full((2,), value)])
        for name, value in (("positions", position), ("state_slots", -1), ("requests", 0),
                            ("slots", -1))
    }  # fmt: skip
    plan = dataclasses.replace(plan, **padded)
    kv_score = torch.cat([history, history[:2]])
    tensors = (layer.ape, layer.norm_weight, layer.rope_table, kv_score, engine.state, engine.cache)
    of_plan = (value for value in vars(plan).values() if isinstance(value, torch.Tensor))
    with checked(*tensors, *of_plan):
        compress_prefill_(layer, kv_score, engine.state, engine.cache, plan, target=TARGET)
    assert_records(engine, layer, wanted(layer, engine, [history], [8]))
