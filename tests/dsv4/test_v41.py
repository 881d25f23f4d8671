"""DeepSeek-V4.1's compressors, step by step: state rows, main records and the indexer's keys."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4_backend
from backend_core.formats import RECORD_FORMATS
from backend_core.operator import forced
from backend_core.tables.load import load_table
from dsv4_backend import (
    RecordSpec,
    V41Call,
    V41Step,
    compress_v41_,
    reference,
    warm_up,
)
from dsv4_backend.launch_params import TABLES
from dsv4_backend.testing import v41 as kit
from dsv4_backend.testing.engine import move_plan
from dsv4_backend.v41.torch import step
from dsv4_backend.v41_step import OPERATOR, v41_selection
from tests.dsv4.cases import DEVICE, TARGET

CPU = torch.device("cpu")
PATHS = [row for row in load_table(TABLES, TARGET).rows if row.operator == OPERATOR]


SHORT = [path for path in PATHS if path.max_longest]
LONG = [path for path in PATHS if not path.max_longest]
# vLLM's formats, and sglang's with rings of 2 rows, are calls of `check` (test_decode.py).


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.name)
@pytest.mark.parametrize(("ratio", "ring_rows"), [(1, 4), (2, 4), (2, 8)])
def test_a_path_of_short_chunks_writes_sglangs_bytes(path, ratio, ring_rows) -> None:
    """Rings have 4 and 8 rows where drafts are verified."""
    most = ring_rows - 1
    steps = [
        [(n, begin, min(begin + most, end))]
        for chunks in kit.CHUNKS
        for n, start, end in chunks
        for begin in range(start, end, most)
    ]
    chosen = forced(TABLES, TARGET, None, path)
    spec = kit.make_spec(ratio, *kit.SGLANG)
    served = kit.serve(spec, steps, TARGET, DEVICE, chosen, ring_rows=ring_rows)
    assert served <= kit.ALLOWED


@pytest.mark.parametrize("path", LONG, ids=lambda path: str(path.max_grid))
@pytest.mark.parametrize(
    ("ratio", "ring_rows", "known"), [(1, 2, False), (2, 2, False), (1, 8, False), (2, 4, True)]
)
def test_a_path_of_prompts_writes_sglangs_bytes(path, ratio, ring_rows, known) -> None:
    """Prompts longer than its rings."""
    chosen = forced(TABLES, TARGET, None, path)
    spec = kit.make_spec(ratio, *kit.SGLANG)
    served = kit.serve(spec, kit.LONG_CHUNKS, TARGET, DEVICE, chosen, False, known, ring_rows)
    assert served <= kit.ALLOWED


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_scores_and_magnitudes_far_apart(path) -> None:
    steps = kit.CHUNKS if path.max_longest else kit.LONG_CHUNKS
    chosen = forced(TABLES, TARGET, None, path)
    spec = kit.make_spec(2, "mxfp8_rows", "indexer_mxfp4")
    assert kit.serve(spec, steps, TARGET, DEVICE, chosen, True) <= kit.ALLOWED


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_torch_path_is_the_definition_of_whole_sequences(ratio: int) -> None:
    """Prompts in chunks and tokens one by one give what the sequence gives as a whole."""
    spec = kit.make_spec(ratio, "bf16_rows", "indexer_fp8")
    length, layer = 27, kit.make_layer(kit.make_spec(ratio, "bf16_rows"), 1, CPU)
    engine, history = kit.V41Engine(spec, 2, length), kit.make_history(spec, length, 9)
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 24), (24, 27)):
        step(engine.call(layer, history[start:end]), engine.plan([(1, start, end)], 0))
    latent = reference.latents(history, layer)
    positions = torch.arange(len(latent)) * ratio
    rows = reference.v41_rows(latent, positions, layer)
    slots = engine.slot_of[1, : len(latent)]
    for cache, records, row in zip(engine.caches, (spec.main, spec.index), rows, strict=True):
        want = reference.quantise(row, records)
        got = reference.load([cache], slots, records)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_a_step_with_a_long_chunk_or_of_unknown_length_takes_two_launches() -> None:
    rows = v41_selection(TARGET, kit.make_spec(2))
    assert rows.row(64, 1).name == rows.row(64, 7).name == "one_launch"
    assert rows.row(64, 8).name == rows.row(64, None).name == "two_launch"
    assert rows.row(4096, 1).name == "two_launch"


def test_slots_of_one_cache_may_be_left_out() -> None:
    """As for tokens that vLLM replays: their latents are made, and nothing is stored."""
    spec = kit.make_spec(2)
    layer = kit.make_layer(spec, 3, CPU)
    for left_out in ("slots", "index_slots"):
        for path in PATHS:
            engine = kit.V41Engine(spec, 2, 8)
            rows = torch.cat([kit.make_history(spec, 6, seed) for seed in (1, 2)])
            plan = engine.plan([(0, 0, 6), (1, 0, 6)], 0)
            plan = dataclasses.replace(plan, **{left_out: torch.full((12,), -1)})
            selection = forced(TABLES, TARGET, None, path)
            kit.compare(engine, engine.call(layer, rows), plan, TARGET, DEVICE, selection)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("formats", [(), kit.SGLANG], ids=["vllm", "sglang"])
def test_a_graph_replays_other_steps(ratio: int, known: bool, formats: Any) -> None:
    """One batch is captured, and others of as many tokens are replayed: prompts where the host does
    not know the chunks, decodes and drafts where it does."""
    steps = (((0, 0, 3), (1, 0, 5)), ((0, 3, 8), (1, 5, 8)), ((1, 8, 11), (0, 8, 13)))
    if not known:
        steps = (((0, 0, 20), (1, 0, 12)), ((0, 20, 21), (1, 12, 43)), ((1, 43, 48), (0, 21, 48)))
    spec = kit.make_spec(ratio, *formats)
    engine, layer = kit.V41Engine(spec, 2, 48), kit.make_layer(spec, 5, CPU)
    histories = [kit.make_history(spec, 48, n) for n in range(2)]
    moved, graph = None, torch.cuda.CUDAGraph()
    for chunks in steps:
        rows = torch.cat([histories[n][a:b] for n, a, b in chunks])
        rows = torch.cat([rows, torch.full((2, spec.row_width), torch.nan)])
        call, plan = engine.call(layer, rows), engine.plan(chunks, 2, known)
        if moved is None:
            moved, held = kit.to_device(call, DEVICE), move_plan(plan, DEVICE)
            tensors = (moved.layer, moved.kv_score, moved.state, moved.cache, moved.index_cache)
            given = {"score": moved.score}
            warm_up(moved, held)
            with torch.cuda.graph(graph):
                compress_v41_(*tensors, held, **given)
        moved.kv_score.copy_(call.kv_score)
        if moved.score is not None:
            moved.score.copy_(call.score)
        names = ("positions", "slots", "index_slots", "state_slots", "query_starts", "requests")
        for name in names:
            if getattr(held, name) is not None:
                getattr(held, name).copy_(getattr(plan, name))
        graph.replay()
        assert kit.judge(engine, call, plan, moved) <= kit.ALLOWED


def test_nvfp4_scales_of_tiny_and_huge_rows() -> None:
    """Scales stay within e4m3's positive range, and larger values saturate."""
    records = RecordSpec(cache_format="nvfp4_rows", page_tokens=4, rounding="vllm", fp8="ocp")
    rows = torch.zeros(3, 512, dtype=torch.float64)
    rows[0], rows[1] = 1e-6, 1e6
    data, scales = reference.quantise(rows, records)
    values = reference.dequantise(data, scales, records)
    assert (scales[0] == 1).all() and (scales[2] == 1).all()  # 2^-9
    assert (values[1] == 6 * 448).all() and (values[[0, 2]] == 0).all()


def test_check_runs_every_record_format_that_an_adapter_names() -> None:
    source = Path(dsv4_backend.__file__).with_name("engines") / "vllm_v41.py"
    text = source.read_text(encoding="utf-8")
    named = {name for name in RECORD_FORMATS if f'"{name}"' in text}
    assert named == {name for formats in kit.FORMATS for name in formats}


def given(ratio: int = 2) -> tuple[tuple[object, ...], V41Step]:
    spec = kit.make_spec(ratio)
    engine, layer = kit.V41Engine(spec, 2, 8), kit.make_layer(spec, 3, CPU)
    call = engine.call(layer, kit.make_history(spec, 8, 1))
    tensors = (call.layer, call.kv_score, call.state, call.cache, call.index_cache)
    return tensors, engine.plan([(0, 0, 8)], 0)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("ratio", "change", "message"),
    [
        (2, {1: lambda x: x[:, :512]}, "kv_score must have shape [T, 1024]"),
        (2, {1: lambda x: x.bfloat16()}, "kv_score must have dtype float32"),
        (2, {1: lambda x: x[:3]}, "kv_score must have at least 8 rows"),
        (2, {2: lambda x: None}, "state must be a tensor for ratio 2"),
        (2, {2: lambda x: x[:, :1]}, "state must have rings of at least 2 rows, got 1"),
        (2, {4: lambda x: x[:, :64]}, "index_cache must have pages of at least"),
        (1, {2: lambda x: torch.zeros(2, 8, 512)}, "state must be None for ratio 1"),
    ],
)
def test_what_breaks_the_contract_is_named(ratio, change, message) -> None:
    tensors, plan = given(ratio)
    broken = [change[n](x) if n in change else x for n, x in enumerate(tensors)]
    with pytest.raises(ValueError, match=re.escape(message)):
        compress_v41_(*broken, plan, target=TARGET)
    with pytest.raises(ValueError, match=re.escape(message)):
        warm_up(V41Call(*broken), plan, target=TARGET)


@pytest.mark.interpreter
def test_specs_and_plans_name_what_breaks_them() -> None:
    spec, (_, plan) = kit.make_spec(2), given()
    with pytest.raises(ValueError, match="compress_ratio must be 1 or 2, got 4"):
        dataclasses.replace(spec, compress_ratio=4)
    with pytest.raises(ValueError, match="cache_format of index must be"):
        dataclasses.replace(spec, index=spec.main)
    with pytest.raises(ValueError, match="must both be given"):
        dataclasses.replace(plan, query_starts=None)
    with pytest.raises(ValueError, match="state_slots must be given for ratio 2"):
        plan = dataclasses.replace(plan, query_starts=None, state_slots=None)
        compress_v41_(*given()[0], plan, target=TARGET)
