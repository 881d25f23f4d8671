"""The chunk table and the grid measure, against a few lines of Python."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_cli import info
from backend_core.tables.load import load_table, shipped_directory
from backend_core.target import KNOWN_TARGETS
from kda_backend import step_plan as step_plan_module
from kda_backend.launch_params import TABLES
from kda_backend.selection import KdaShape, select
from kda_backend.step_plan import (
    ChunkTable,
    StepPlan,
    build_chunk_table,
    build_step_plan,
    equal_length_plan,
)
from kda_backend.testing.cases import chunks_of, cu_tensor
from tests.kda.cases import Backend

RAGGED = [
    (),
    (0,),
    (1,),
    (64,),
    (65,),
    (0, 0, 0),
    (70, 0, 9, 0, 64, 128, 1),
    (64 * 300 + 1, 5),
    (3,) * 129,
    tuple(n * 37 % 200 for n in range(300)),
    (0,) * 128 + (130, 7),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", RAGGED, ids=lambda lengths: f"{len(lengths)}_sequences")
def test_chunk_table_of_ragged_batches(
    device: torch.device, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    start, length, offsets = chunks_of(lengths)
    got = table_of(cu_tensor(lengths, device).to(dtype), len(start))
    longest_first = sorted(range(len(lengths)), key=lambda n: -lengths[n] // 64)
    assert (got.start.tolist(), got.length.tolist()) == (start, length)
    assert got.offsets.tolist() == offsets
    assert got.chunk_major.tolist() == chunk_major(offsets)
    assert got.sequence_order.tolist() == longest_first
    assert got.sequence_major.tolist() == [
        chunk for n in longest_first for chunk in range(offsets[n], offsets[n + 1])
    ]
    assert all(x.data_ptr() % 16 == 0 for x in got if x.numel())
    assert all(x.dtype == torch.int32 for x in got)


def table_of(cu_seqlens: torch.Tensor, capacity: int) -> ChunkTable:
    """The table with its entries alone."""
    sequences = cu_seqlens.shape[0] - 1
    sizes = (*(capacity,) * 4, sequences + 1, sequences)
    whole = build_chunk_table(cu_seqlens, capacity)
    return ChunkTable(*(part[:size] for part, size in zip(whole, sizes, strict=True)))


def chunk_major(offsets: list[int]) -> list[int]:
    """Every sequence's first chunk, then every sequence's second, and so on."""
    depths = [
        (chunk - first, chunk)
        for first, end in itertools.pairwise(offsets)
        for chunk in range(first, end)
    ]
    return [chunk for _, chunk in sorted(depths)]


@pytest.mark.parametrize("spare", [1, 127, 200])
def test_chunks_past_the_last_are_empty(device: torch.device, spare: int) -> None:
    start, length, offsets = chunks_of((70, 0, 9))
    got = table_of(cu_tensor((70, 0, 9), device), len(start) + spare)
    assert got.start.tolist() == start + [0] * spare
    assert got.length.tolist() == length + [0] * spare
    behind = [len(start) + i for i in range(spare)]
    assert got.chunk_major.tolist() == chunk_major(offsets) + behind
    assert got.sequence_major.tolist() == [0, 1, 2, *behind]
    assert got.offsets.tolist() == offsets


def test_a_bound_is_reached_by_some_batch() -> None:
    on_meta = cu_tensor((65, 65, 65), torch.device("meta"))
    assert build_step_plan(on_meta, 195, chunk_table=False).num_chunks == 6
    on_meta = cu_tensor((1, 1, 0, 0), torch.device("meta"))
    assert build_step_plan(on_meta, 2, chunk_table=False).num_chunks == 2


def test_lengths_of_any_batch_are_not_those_of_one() -> None:
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="lengths that the host does not know, got cu_seqlens_cpu"):
        build_step_plan(
            offsets.to("meta"), 5, cu_seqlens_cpu=offsets, chunk_table=False, any_batch=True
        )


def test_the_longest_sequence_is_known_or_taken_for_an_equal_share() -> None:
    lengths = (70, 0, 9, 640)
    known = build_step_plan(cu_tensor(lengths, torch.device("cpu")), 719, chunk_table=False)
    assert (known.num_chunks, known.max_chunks, known.long_sequences) == (13, 10, 1)
    on_meta = cu_tensor(lengths, torch.device("meta"))
    bound = build_step_plan(on_meta, 719, chunk_table=False)
    assert (bound.num_chunks, bound.max_chunks, bound.long_sequences) == (15, 4, 4)


def test_the_grid_counts_each_sequences_chunks_times_value_heads(
    kernels: Backend, seed: int
) -> None:
    """Chunks do not cross sequences: three of 22 tokens are three chunks, not ceil(66 / 64)."""
    case = kernels.case(seed, (22, 22, 22), heads=1, value_heads=2, dims="narrow")
    selection = kernels.selection(case.shape)
    seen: list[int] = []

    class Spy:
        def choose(self, grid: int, longest: int) -> object:
            assert longest == 22
            seen.append(grid)
            return selection.prefill.choose(grid)

    spied = dataclasses.replace(selection, prefill=Spy())  # type: ignore[arg-type]
    kernels.chunk(case, selection=spied, cu_seqlens_cpu=case.cu_seqlens.cpu())
    assert seen == [3 * 2]


def test_equal_lengths_are_described_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = equal_length_plan(3, 70, device, True)
    assert meta.cu_seqlens.tolist() == [0, 70, 140, 210]
    assert (meta.num_tokens, meta.num_chunks, meta.num_sequences) == (210, 6, 3)
    assert meta.chunk_table is not None
    assert meta.chunk_table.length[:6].tolist() == [64, 6] * 3

    def must_not_build(*args: object, **kwargs: object) -> StepPlan:
        raise AssertionError("built a second time")

    monkeypatch.setattr(step_plan_module, "build_step_plan", must_not_build)
    assert equal_length_plan(3, 70, device, True) is meta


@pytest.mark.parametrize(
    ("shape", "features"),
    [
        (KdaShape(4, 4, 128, 128), {"unbounded_gate"}),
        (KdaShape(4, 4, 128, 128, True), {"bounded_gate"}),
        (KdaShape(4, 8, 128, 128), {"unbounded_gate", "grouped_values"}),
        (KdaShape(4, 4, 128, 64), {"unbounded_gate", "any_head_dim"}),
        (KdaShape(4, 4, 64, 128), {"unbounded_gate", "any_head_dim"}),
        (KdaShape(4, 4, 128, 128, dtype=torch.float16), {"unbounded_gate", "any_dtype"}),
        (KdaShape(4, 4, 128, 128, gate_dtype=torch.float32), {"unbounded_gate", "any_dtype"}),
    ],
)
def test_what_a_shape_requires_of_a_path(shape: KdaShape, features: set[str]) -> None:
    for operator in TABLES.operator_names:
        assert shape.requires(operator) == features


@pytest.mark.parametrize(
    ("key_dim", "dtype", "is_wide"),
    [
        (128, "bfloat16", False),
        (129, "bfloat16", True),
        (64, "float32", False),
        (65, "float32", True),
    ],
)
def test_prefill_alone_requires_rows_of_more_than_256_bytes(
    key_dim: int, dtype: str, is_wide: bool
) -> None:
    """Where 99 KiB of shared memory do not hold them, the sentence says so."""
    shape = KdaShape(4, 4, key_dim, 128, dtype=getattr(torch, dtype))
    for operator in TABLES.operator_names:
        assert ("wide_rows" in shape.requires(operator)) == (is_wide and operator == "prefill")
    for name in ("A40", "L40S", "RTX 5090", "GB10"):
        if not is_wide:
            assert select(KNOWN_TARGETS[name], shape).prefill.row(1).name == "two_stage"
            continue
        with pytest.raises(LookupError, match=r"no prefill path .* two_stage lacks wide_rows"):
            select(KNOWN_TARGETS[name], shape)


def test_no_nvidia_row_asks_for_a_scan_of_one_stage() -> None:
    """Which was seen to compute wrong values on Hopper (docs/studies/kda.md)."""
    stages = [
        row.params.scan_num_stages
        for target in KNOWN_TARGETS.values()
        if target.vendor == "nvidia"
        for row in load_table(TABLES, target).rows
        if row.name == "two_stage"
    ]
    assert len(stages) >= 8 and min(stages) >= 2


def test_steps_with_bulk_copies_require_states_on_16_bytes() -> None:
    shape = KdaShape(4, 4, 128, 128, aligned_state=False)
    for operator in TABLES.operator_names:
        copies = operator in ("decode_step", "verify_records")
        assert ("unaligned_state" in shape.requires(operator)) == copies
    hopper = select(KNOWN_TARGETS["H200"], shape)
    assert {path.name for path in hopper.decode_step.rows} == {"fused"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("block_v = 16", "block_v = 24", r"block_v must be one of 16, 32, 64, 128, got 24"),
        (
            "block_v_max = 64",
            "block_v_max = 8",
            "block_v_max must be one of 16, 32, .* got 8",
        ),
        ("block_v = 16", "block_v = 128", "block_v must be at most block_v_max, got 128 and 64"),
        ("scan_num_warps = 4", "scan_num_warps = 3", "scan_num_warps must be one of 1, 2, 4"),
        ("k_inner = 64", "k_inner = 0", "k_inner must be one of 1, 2, 4, .* got 0"),
        (
            "fused_conv_tiles = ",
            "fused_conv_tiles = -",
            "fused_conv_tiles must not be negative, got -",
        ),
    ],
)
def test_a_table_with_parameters_that_no_kernel_has_is_refused_when_it_is_read(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    text = (shipped_directory() / "kda" / "nvidia_sm90.toml").read_text()
    (tmp_path / "kda").mkdir()
    assert old in text
    (tmp_path / "kda" / "nvidia_sm90.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=rf"nvidia_sm90\.toml: .*{message}"):
        load_table(TABLES, KNOWN_TARGETS["H200"], directory=tmp_path)


def test_what_info_shows_is_what_runs() -> None:
    """200 random prefill steps: the row that the chooser takes is the first that info shows for
    their grid and lengths, by limits that are worked out here."""
    rng, seen = random.Random(5), set()
    for _ in range(200):
        heads = rng.choice((1, 4, 8, 16, 32))
        shape = KdaShape(heads, heads, 128, 128, deterministic_prefix=rng.random() < 0.3)
        most = rng.choice((16, 64, 300, 5000, 20000))
        lengths = [rng.randint(1, most) for _ in range(rng.randint(1, 12))]
        longest = max(lengths) if rng.random() < 0.8 else None
        grid = sum(-(-n // 64) for n in lengths) * heads
        chosen = select(KNOWN_TARGETS["H200"], shape).prefill.row(grid, longest)
        rows = shown_rows(shape.requires("prefill"))
        assert chosen.name == next(row["path"] for row in rows if serves(row, grid, longest))
        seen.add(chosen.name)
    assert seen == {"one_launch_sm90", "segmented_sm90", "two_stage_sm90"}


@functools.cache
def shown_rows(requires: frozenset[str]) -> list[dict[str, Any]]:
    """The rows of prefill that `kda-dsv4 info --target H200` shows for a model's needs."""
    target = info.build_report([KNOWN_TARGETS["H200"]], requires)["targets"][0]
    family = next(one for one in target["families"] if one["family"] == "kda")
    operator = next(one for one in family["operators"] if one["operator"] == "prefill")
    rows: list[dict[str, Any]] = operator["selections"][0]["rows"]
    return [row for row in rows if row["refusal"] is None]


def serves(row: dict[str, Any], grid: int, longest: int | None) -> bool:
    """Whether a call is within what info shows of a row."""
    limits = row["max_longest"], row["min_longest"], row["max_width"]
    if limits == (None, None, None):
        return True
    if longest is None:
        return False
    most, least, width = limits
    share = -(-longest // 64)
    return (
        (most is None or longest <= most)
        and (least is None or longest >= least)
        and (width is None or grid < (width + 1) * share)
    )
