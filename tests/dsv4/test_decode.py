"""A decode step in one launch, byte for byte: every format, rounding and plan."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from backend_core.operator import forced
from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from dsv4_backend import CompressorCall, compress_decode_, scratch, warm_up
from dsv4_backend.launch_params import TABLES
from dsv4_backend.scratch import ColumnScratch
from dsv4_backend.testing.check_cases import check_cases
from dsv4_backend.torch_step import step
from tests.dsv4.cases import (
    DEVICE,
    TARGET,
    CompressorEngine,
    assert_records,
    expected_rows,
    make_history,
    make_layer,
    make_spec,
    settle,
)
from tests.out_of_memory import failing

TABLE = load_table(TABLES, TARGET).rows
# For ratio r: in the middle of a window, first window, a later window, one before its end.
LENGTHS = {4: [6, 4, 24, 11], 128: [130, 128, 256, 127]}


def prepare(spec, layout, state_dtype=torch.float32, input_dtype=torch.float32, seed=0):
    """An engine whose requests are all but their newest token in the state."""
    layer = make_layer(spec, seed)
    lengths = LENGTHS[spec.compress_ratio]
    engine = CompressorEngine(layout, spec, lengths, state_dtype)
    histories = [make_history(spec, length, 10 * seed + n) for n, length in enumerate(lengths)]
    for request, history in enumerate(histories):
        engine.fill_state(layer, request, history[:-1])
    if state_dtype != torch.float32:  # what a bf16 state gives back
        histories = [torch.cat((_through(h[:-1], state_dtype), h[-1:])) for h in histories]
    entries = [(0, lengths[0]), None, (1, lengths[1]), (2, lengths[2]), None, (3, lengths[3])]
    padded = torch.full((len(entries), spec.row_width + 32), torch.nan, dtype=input_dtype)
    kv_score = padded.to(layer.ape.device)[:, : spec.row_width]
    for n, entry in enumerate(entries):
        if entry is not None:
            kv_score[n] = histories[entry[0]][-1].to(input_dtype)
    return layer, engine, histories, entries, kv_score


def _through(history, dtype):
    return history.to(dtype).float()


def check(layer, engine, histories, entries, state_before):
    """Caches as the definition says, state rows of the new tokens exact, all others untouched."""
    spec = layer.spec
    want = {}
    state = state_before.clone()
    for entry in entries:
        if entry is None:
            continue
        request, seq_len = entry
        if seq_len % spec.compress_ratio == 0:
            want[engine.slot(request, seq_len)] = expected_rows(layer, histories[request])[-1]
        page, row = engine.locate(request, seq_len - 1)
        state[page, row] = engine.expected_row(layer, histories[request][-1], seq_len - 1)
    assert_records(engine, layer, want)
    torch.testing.assert_close(engine.state, state, rtol=0, atol=0, equal_nan=True)


def run(spec, layout, **kwargs):
    """As if the kernel in front wrote anything, and as if the input alone, as in engines."""
    layer, engine, histories, entries, kv_score = prepare(spec, layout, **kwargs)
    before, caches = engine.state.clone(), [cache.clone() for cache in engine.caches]
    for is_safe in (False, True):
        engine.state.copy_(before)
        for kept, given in zip(engine.caches, caches, strict=True):
            kept.copy_(given)
        plan = engine.decode_plan(entries, is_safe)
        settle()
        compress_decode_(
            *(layer, kv_score, engine.state, engine.cache, plan),
            second_cache=engine.second_cache,
            target=TARGET,
        )
        check(layer, engine, histories, entries, before)


FORMATS = ["fp8_ds_mla", "bf16_rows", "indexer_fp8", "indexer_mxfp4"]


@pytest.mark.parametrize("rounding", ["sglang", "vllm"])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_formats_and_roundings(cache_format: str, rounding: str) -> None:
    run(make_spec(cache_format, rounding=rounding), "ring")


@pytest.mark.parametrize("layout", ["ring", "paged"])
@pytest.mark.parametrize(
    "cache_format, ratio", [("fp8_ds_mla", 4), ("indexer_fp8", 4), ("fp8_ds_mla", 128)]
)
def test_plans(cache_format: str, ratio: int, layout: str) -> None:
    run(make_spec(cache_format, ratio, page_tokens=3), layout, seed=1)


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "indexer_fp8"])
@pytest.mark.parametrize("rounding", ["sglang", "vllm"])
def test_fnuz(cache_format: str, rounding: str) -> None:
    run(make_spec(cache_format, rounding=rounding, fp8="fnuz"), "ring", seed=2)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("rope_layout", ["interleaved", "split"])
def test_rope_layouts_and_rotation(rope_layout: str, rotate: bool) -> None:
    spec = make_spec("indexer_mxfp4", rope_layout=rope_layout, rotate=rotate)
    run(spec, "paged", seed=3)


@pytest.mark.parametrize("rope_layout", ["interleaved", "split"])
def test_a_complex_table_is_laid_out_as_the_spec_says(rope_layout: str) -> None:
    layer = make_layer(make_spec("indexer_fp8", rope_layout=rope_layout))
    table = layer.rope_table
    parts = table.view(-1, 32, 2).unbind(2) if rope_layout == "interleaved" else table.chunk(2, 1)
    freqs_cis = torch.complex(*(part.contiguous() for part in parts))
    assert torch.equal(replace(layer, rope_table=freqs_cis).rope_table, table)


@pytest.mark.parametrize("layout", ["ring", "paged"])
def test_bf16_input(layout: str) -> None:
    run(make_spec("indexer_fp8"), layout, input_dtype=torch.bfloat16, seed=4)


def test_bf16_state() -> None:
    run(make_spec("indexer_fp8"), "ring", state_dtype=torch.bfloat16, seed=5)


@pytest.mark.parametrize("layout", ["ring", "paged"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_the_torch_path_is_the_definition(layout: str, ratio: int) -> None:
    spec = make_spec("fp8_ds_mla", ratio)
    layer, engine, histories, entries, kv_score = prepare(spec, layout, seed=8)
    before, given = engine.state.clone(), kv_score.clone()
    plan = engine.decode_plan(entries)
    step(engine.call(layer, kv_score), plan)
    check(layer, engine, histories, entries, before)
    torch.testing.assert_close(kv_score, given, rtol=0, atol=0, equal_nan=True)


def test_a_negative_slot_writes_the_state_and_no_row() -> None:
    layer, engine, histories, entries, kv_score = prepare(make_spec("indexer_fp8"), "ring", seed=9)
    before = engine.state.clone()
    plan = engine.decode_plan(entries)
    plan.slots[3] = -1
    compress_decode_(layer, kv_score, engine.state, engine.cache, plan, target=TARGET)
    spec, want = layer.spec, {}
    for request, seq_len in [entries[2]]:
        want[engine.slot(request, seq_len)] = expected_rows(layer, histories[request])[-1]
    assert_records(engine, layer, want)
    page, row = engine.locate(2, LENGTHS[spec.compress_ratio][2] - 1)
    assert torch.equal(engine.state[page, row], histories[2][-1])
    assert not torch.equal(engine.state, before)


def test_duplicate_entries_store_once_what_each_would() -> None:
    layer, engine, histories, entries, kv_score = prepare(make_spec("indexer_fp8"), "ring", seed=11)
    before = engine.state.clone()
    doubled = entries + entries
    plan = engine.decode_plan(doubled)
    both = torch.cat((kv_score, kv_score))
    compress_decode_(layer, both, engine.state, engine.cache, plan, target=TARGET)
    check(layer, engine, histories, entries, before)


def test_no_requests() -> None:
    layer, engine, _, _, kv_score = prepare(make_spec("indexer_fp8"), "ring", seed=12)
    before = engine.state.clone()
    plan = engine.decode_plan([None])
    object.__setattr__(plan, "entries", plan.entries[:0])
    object.__setattr__(plan, "slots", plan.slots[:0])
    compress_decode_(layer, kv_score[:0], engine.state, engine.cache, plan, target=TARGET)
    assert_records(engine, layer, {})
    torch.testing.assert_close(engine.state, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["ring", "paged"])
def test_warm_up_writes_nothing(layout: str) -> None:
    layer, engine, _, entries, kv_score = prepare(make_spec("indexer_fp8"), layout, seed=13)
    before = engine.state.clone()
    for plan in (engine.decode_plan(entries), engine.prefill_plan([(0, 0, len(entries))])):
        warm_up(CompressorCall(layer, kv_score, engine.state, engine.cache), plan, target=TARGET)
    assert_records(engine, layer, {})
    torch.testing.assert_close(engine.state, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("splits", "layout"), [(2, "ring"), (8, "paged")])
def test_split_channels_write_the_same_bytes(splits: int, layout: str) -> None:
    """Again and again from one memory, as a graph's replays do, and with more requests than that
    was made for."""
    spec = make_spec("fp8_ds_mla", 128)
    layer, engine, histories, entries, kv_score = prepare(spec, layout, seed=14)
    before, caches = engine.state.clone(), [cache.clone() for cache in engine.caches]
    row = next(row for row in TABLE if row.operator == "main_c128_decode")
    whole = replace(row, max_grid=None, params=replace(row.params, splits=1))
    split = replace(whole, params=replace(row.params, splits=splits))

    def run_on(row: Row, entries: list[tuple[int, int] | None]) -> None:
        engine.state.copy_(before)
        for cache, given in zip(engine.caches, caches, strict=True):
            cache.copy_(given)
        compress_decode_(
            *(layer, kv_score[: len(entries)], engine.state, engine.cache),
            engine.decode_plan(entries),
            target=TARGET,
            selection=forced(TABLES, TARGET, None, row),
        )

    for few in (entries[:3], entries):
        run_on(whole, few)
        wanted, state = [cache.clone() for cache in engine.caches], engine.state.clone()
        run_on(split, few)
        for cache, want in zip(engine.caches, wanted, strict=True):
            assert torch.equal(cache, want)
        torch.testing.assert_close(engine.state, state, rtol=0, atol=0, equal_nan=True)
    check(layer, engine, histories, entries, before)


@pytest.mark.parametrize("number", [0, 1])
def test_split_channels_after_memory_ran_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, engine, _, entries, kv_score = prepare(make_spec("fp8_ds_mla", 128), "ring", seed=17)
    row = next(row for row in TABLE if row.operator == "main_c128_decode")
    chosen = forced(TABLES, TARGET, None, replace(row, params=replace(row.params, splits=8)))
    tensors = layer, kv_score, engine.state, engine.cache, engine.decode_plan(entries)
    before = engine.cache.clone()
    with failing(monkeypatch, number), pytest.raises(torch.OutOfMemoryError):
        compress_decode_(*tensors, target=TARGET, selection=chosen)
    assert torch.equal(engine.cache, before)
    compress_decode_(*tensors, target=TARGET, selection=chosen)
    assert not torch.equal(engine.cache, before)


def test_split_channels_memory_of_a_capture_is_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its zeros are written in replays, and lie nowhere before the first."""
    memory, seen = ColumnScratch(), []
    for capturing in (True, True, False, False, True):
        monkeypatch.setattr(scratch, "is_capturing", lambda device, now=capturing: now)
        seen.append(memory.reserve(4, 8, DEVICE)[1])
    first, second, eager, again, later = seen
    assert first is not second and eager is again and later is eager
    assert eager is not first and eager is not second


def test_split_channels_memory_that_a_graph_may_hold_is_kept() -> None:
    """As long as the layer, however it grows."""
    memory = ColumnScratch()
    few = [weakref.ref(x) for x in memory.reserve(4, 8, DEVICE)]
    assert memory.reserve(3, 8, DEVICE)[1] is few[1]()
    assert memory.reserve(9, 8, DEVICE)[1].shape[0] >= 9
    gc.collect()
    assert all(x() is not None for x in few)


def test_split_channels_need_one_warp_on_hip(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, engine, _, entries, kv_score = prepare(make_spec("fp8_ds_mla", 128), "ring", seed=15)
    row = next(row for row in TABLE if row.operator == "main_c128_decode")
    path = replace(row, params=replace(row.params, splits=8, num_warps=4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="must come with num_warps 1 on HIP, got 4"):
        compress_decode_(
            *(layer, kv_score, engine.state, engine.cache, engine.decode_plan(entries)),
            target=TARGET,
            selection=forced(TABLES, TARGET, None, path),
        )


@pytest.mark.parametrize(
    "row",
    # prefills of 128 tokens a window take seconds in the interpreter
    [row for row in TABLE if DEVICE.type != "cpu" or row.operator != "main_c128_prefill"],
    ids=lambda row: f"{row.operator}-{row.max_grid}",
)
def test_every_row_of_the_table_is_right(row: Row) -> None:
    """Whatever its grid: the rows for many requests, too."""
    for name, run_case in check_cases(row).items():
        error, allowed = run_case(TARGET, DEVICE)
        assert error <= allowed, name
