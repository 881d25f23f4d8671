"""The record formats of AMD's engines: read as their kernels do, they are plain records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4_backend
from backend_core.formats import RECORD_FORMATS
from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS, Target
from dsv4_backend import (
    CompressorSpec,
    compress_decode_,
    compress_prefill_,
    quantise_indexer_queries,
    reference,
)
from dsv4_backend.compressor.torch_step import step
from dsv4_backend.launch_params import TABLES
from dsv4_backend.testing import check_cases
from dsv4_backend.testing.check_cases import AMD_LAYOUTS
from tests.dsv4.cases import (
    DEVICE,
    POISON,
    TARGET,
    Engine,
    assert_records,
    expected_rows,
    make_history,
    make_layer,
    make_spec,
    rope_table,
)
from tests.dsv4.readers import READERS

MI355X = KNOWN_TARGETS["MI355X"] if DEVICE.type == "cpu" else TARGET
LAYOUTS = [(spec, state) for _, state, spec in AMD_LAYOUTS]
NAMES = [f"{spec.cache_format} c{spec.compress_ratio} {state}" for spec, state in LAYOUTS]
WAYS = ("decode", "prefill")
LENGTHS = {4: [17, 12, 3], 128: [130, 128]}


def plain(spec: CompressorSpec) -> CompressorSpec:
    """The same compressor with records in the plain format of their encoding."""
    return dataclasses.replace(spec, cache_format=spec.record.encoding)


def serve(spec: CompressorSpec, state: Any, target: Target | None = MI355X) -> Engine:
    """Chunks cut inside windows, then single tokens; on the torch path without a target."""
    layer, lengths = make_layer(spec, 7), LENGTHS[spec.compress_ratio]
    engine = Engine(state, spec, lengths)
    histories = [make_history(spec, n, 70 + r) for r, n in enumerate(lengths)]
    cuts = [(0, n // 2 + 1) for n in lengths], [(n // 2 + 1, n - 2) for n in lengths]
    steps = [[(r, *cut) for r, cut in enumerate(part) if cut[0] < cut[1]] for part in cuts]
    steps += [[(r, n - back, n - back + 1) for r, n in enumerate(lengths)] for back in (2, 1)]
    for number, chunks in enumerate(steps):
        rows = torch.cat([histories[r][start:end] for r, start, end in chunks])
        operator: Any = compress_prefill_ if number < 2 else compress_decode_
        plan: Any = engine.prefill_plan(chunks)
        if number >= 2:
            plan = engine.decode_plan([(r, end) for r, _, end in chunks])
        if target is None:
            step(engine.call(layer, rows), plan)
        else:
            tensors = (layer, rows, engine.state, engine.cache, plan)
            operator(*tensors, second_cache=engine.second_cache, target=target)
    want = {}
    for r, history in enumerate(histories):
        for i, row in enumerate(expected_rows(layer, history)):
            want[engine.slot(r, (i + 1) * spec.compress_ratio)] = row
    assert_records(engine, layer, want)
    return engine


def assert_read(engine: Engine, other: Engine) -> None:
    """What the kernels that read find in ``engine`` are the bytes of ``other``'s plain pages."""
    spec, used = engine.spec, other.spec.page_bytes
    read = READERS[spec.cache_format](engine.caches, spec.page_tokens)[:, :used]
    want = other.cache[:, :used].clone()
    if other.spec.cache_format == "fp8_ds_mla":
        want[:, 576 * spec.page_tokens + 7 :: 8] = 0  # of no meaning, and in no pool
    assert torch.equal(engine.slot_of, other.slot_of) and torch.equal(read, want)


@pytest.mark.parametrize(("spec", "state"), LAYOUTS, ids=NAMES)
@pytest.mark.parametrize("target", [None, MI355X], ids=["torch", "kernels"])
def test_the_kernels_that_read_find_plain_records(
    spec: CompressorSpec, state: str, target: Target | None
) -> None:
    engine = serve(spec, state, target)
    assert_read(engine, serve(plain(spec), state, target))
    for cache, page_bytes in zip(
        engine.caches, (spec.page_bytes, spec.second_page_bytes), strict=False
    ):
        assert (cache[:, page_bytes:] == POISON).all()


@pytest.mark.parametrize(("engine", "state"), [("vllm", "paged"), ("sglang", "ring")])
def test_check_runs_every_record_format_that_an_adapter_names(
    monkeypatch: pytest.MonkeyPatch, engine: str, state: str
) -> None:
    """In decode and prefill of the gfx950 table, and in steps of that engine."""
    sources = Path(dsv4_backend.__file__).parent.joinpath("engines").glob(f"{engine}*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    named = {name for name in RECORD_FORMATS if f'"{name}"' in source}
    ratios = {name: (4,) if name.startswith("indexer") else (4, 128) for name in named}
    wanted = {(name, r, way) for name in named for r in ratios[name] for way in WAYS}
    run = set()

    def keep(path: Any, layout: str, spec: CompressorSpec, *others: Any) -> float:
        way = path.operator.rpartition("_")[2]
        if layout == state:
            run.add((spec.cache_format, spec.compress_ratio, way))
        return 0.0

    monkeypatch.setattr(check_cases, "_steps", keep)
    for row in load_table(TABLES, KNOWN_TARGETS["MI355X"]).rows:
        if row.operator.rpartition("_")[2] in WAYS:
            for case in check_cases.check_cases(row).values():
                case(KNOWN_TARGETS["MI355X"], DEVICE)
    assert len(named) >= 6 and wanted <= run


@pytest.mark.parametrize("name", ["MI300X", "MI355X"])
def test_check_writes_sglangs_e4m3_of_each_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target = KNOWN_TARGETS[name]
    made = []

    def keep(layout: str, spec: CompressorSpec, *others: Any, **options: Any) -> Any:
        made.append((layout, spec.fp8))
        raise KeyError

    monkeypatch.setattr(check_cases, "Engine", keep)
    for row in load_table(TABLES, target).rows:
        for title, case in check_cases.check_cases(row).items():
            if title.startswith("small, "):
                with pytest.raises(KeyError):
                    case(target, DEVICE)
    assert set(made) == {("paged", "ocp"), ("ring", "fnuz" if name == "MI300X" else "ocp")}


def test_a_pools_rows_keep_the_bytes_that_nobody_reads() -> None:
    spec = make_spec("fp8_two_pools", rounding="sglang", page_tokens=1)
    engine = serve(spec, "ring")
    assert (engine.cache[:, 462:512] == POISON).all()


@pytest.mark.parametrize("cache_format", READERS)
def test_every_byte_of_a_page_has_one_place(cache_format: str) -> None:
    spec = make_spec(cache_format)
    where = reference.places(spec)
    sizes = (spec.page_bytes, spec.second_page_bytes)
    for (offsets, columns), size in zip(where, sizes, strict=False):
        flat = offsets.flatten()
        assert len(flat.unique()) == len(flat) and int(flat.min()) >= 0 and int(flat.max()) < size
        assert offsets.shape == (spec.page_tokens, len(columns))
        if cache_format != "fp8_two_pools":
            assert len(flat) == size
    found = torch.cat([columns for _, columns in where]).unique()
    missing = 1 if cache_format == "fp8_two_pools" else 0  # the plain record's zero
    assert len(found) == spec.record.record_bytes - missing


@pytest.mark.parametrize("cache_format", [name for name in READERS if "indexer" in name])
def test_queries_have_the_encoding_of_their_keys(cache_format: str) -> None:
    spec = make_spec(cache_format, rounding="aiter" if "planes" in cache_format else "vllm")
    rng = torch.Generator().manual_seed(1)
    q, weights = (torch.randn(*shape, generator=rng).to(DEVICE) for shape in ((3, 4, 128), (3, 4)))
    positions = torch.tensor([0, 5, 900], device=DEVICE)
    table = rope_table()
    found = [
        quantise_indexer_queries(x, q, positions, table, weights, 0.1, 0.5, target=TARGET)
        for x in (spec, plain(spec))
    ]
    for ours, theirs in zip(*found, strict=True):
        assert (ours is theirs) if ours is None else torch.equal(ours, theirs)


@pytest.mark.parametrize("fp8", ["ocp", "fnuz"])
def test_tiles_of_both_flavours_of_fp8(fp8: str) -> None:
    spec = make_spec("indexer_fp8_tiles", rounding="sglang", fp8=fp8)
    assert_read(serve(spec, "ring"), serve(plain(spec), "ring"))


@pytest.mark.parametrize("tokens", [32, 128])
def test_pages_of_several_tiles(tokens: int) -> None:
    for cache_format in ("indexer_fp8_tiles", "indexer_mxfp4_tiles"):
        spec = make_spec(cache_format, page_tokens=tokens)
        assert_read(serve(spec, "paged"), serve(plain(spec), "paged"))


@pytest.mark.parametrize(
    ("cache_format", "changes", "message"),
    [
        ("indexer_fp8_tiles", {"page_tokens": 24}, "page_tokens must be a multiple of 16 for"),
        ("indexer_mxfp4_tiles", {"page_tokens": 16}, "page_tokens must be a multiple of 32 for"),
        ("indexer_mxfp4_planes", {"page_tokens": 128}, "page_tokens must be 64 for"),
        ("indexer_fp8", {"rounding": "aiter"}, "rounding aiter must go with MXFP4 records, got"),
        ("fp8_two_pools", {"rounding": "aiter"}, "rounding aiter must go with MXFP4 records, got"),
    ],
)
def test_specs(cache_format: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(cache_format, **changes)


def test_the_second_tensor_goes_with_the_format() -> None:
    def run(cache_format: str, change: Any) -> None:
        spec = make_spec(cache_format)
        engine, layer = Engine("ring", spec, [8]), make_layer(spec)
        second = change(engine.second_cache)
        before = [cache.clone() for cache in engine.caches]
        row = make_history(spec, 1, 0)
        tensors = (layer, row, engine.state, engine.cache, engine.decode_plan([(0, 8)]))
        try:
            compress_decode_(*tensors, second_cache=second, target=TARGET)
        finally:
            assert all(map(torch.equal, engine.caches, before))

    for cache_format, change, message in (
        ("indexer_fp8", lambda x: torch.zeros(3, 64), "second_cache must be None for indexer_fp8,"),
        ("fp8_two_pools", lambda x: None, "second_cache must be a tensor for fp8_two_pools, got"),
        ("fp8_two_pools", lambda x: x[:, :500], "second_cache must have pages of at least 512"),
        ("fp8_two_pools", lambda x: x[1:], "second_cache must have 2 pages .as cache has., got 1"),
        ("indexer_mxfp4_planes", lambda x: x.short(), "second_cache must have dtype uint8, got"),
    ):
        with pytest.raises(ValueError, match=message):
            run(cache_format, change)
