"""Where engines are served: the path table's rows upstream say what the result files have."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend_core.target import KNOWN_TARGETS, Target
from mla_backend.beside import result_file, select_beside, sizes_in_words
from mla_backend.engines.mla_decoder import decode_paths
from mla_backend.engines.sparse_layer import sparse_paths
from mla_backend.family import FAMILY
from mla_backend.spec import MlaSpec

ROOT = Path(__file__).parents[2]
H200 = KNOWN_TARGETS["H200"]
DEEPSEEK_V4 = {"model_type": "deepseek_v4", "num_attention_heads": 64}
KIMI = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 32}
CONTEXTS = ("1k", "8k", "64k")


MEAN, WORST = 0.97, 1.02
"""A size is ours up to the largest batch at which, as at every smaller one that was measured, ours
takes at most `MEAN` of the other kernel's time in the geometric mean over contexts, and at none of
them more than `WORST`: 2 % is what two runs differ by."""
MLA = "benchmarks/results/mla_decode_h200.json"
SHARED = "benchmarks/results/mla_shared_h200.json"
SPARSE = "benchmarks/results/dsv4_attention_h200.json"


def measured(source: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / source).read_text())["rows"]
    return rows


def shares(rows: int) -> dict[int, list[float]]:
    """Ours over FlashAttention 3's time at each context, by number of requests."""
    found: dict[int, list[float]] = {}
    for row in measured(MLA):
        count, _, context = row["case"].partition("x")
        if row["heads"] == rows and context in CONTEXTS:
            found.setdefault(int(count), []).append(row["ours_gpu_us"] / row["fa3_us"])
    assert all(len(values) == len(CONTEXTS) for values in found.values())
    return found


def ahead(batches: dict[int, list[float]]) -> int | None:
    """The largest batch up to which ours is ahead; ``None`` where it is in all."""
    most = 0
    for batch, values in sorted(batches.items()):
        mean = math.prod(values) ** (1 / len(values))
        if mean > MEAN or max(values) > WORST:
            return most
        most = batch
    return None


@pytest.mark.parametrize("rows", sorted({row["heads"] for row in measured(MLA)}))
def test_the_limits_are_those_of_the_result_file(rows: int) -> None:
    selection = decode_paths(H200, rows, 64, "fa3", (1,)).served[1]
    assert (selection.sizes[0], result_file(selection)) == ((1, ahead(shares(rows))), MLA)


@pytest.mark.parametrize("heads", [4, 8, 16, 32])
def test_shared_prompts_are_looked_for_where_that_was_faster(heads: int) -> None:
    """At the fewest requests and tokens of a row, between two that were measured, the search is no
    slower than FlashAttention 3 and than a plan without it."""
    points = {(r["requests"], r["shared"]): r for r in measured(SHARED) if r["heads"] == heads}
    selection = decode_paths(H200, heads, 64, "fa3", (1,)).served[1]
    found = [row.params for row in selection.rows if row.name != "upstream"]
    searching = [params for params in found if params.shared_requests]
    assert searching
    for params in searching:
        low, high = points[params.shared_requests, 2048], points[params.shared_requests, 8192]
        part = (params.shared_tokens - 2048) / (8192 - 2048)
        at = {key: low[key] + part * (high[key] - low[key]) for key in low if key.endswith("_us")}
        assert 0 < part < 1 and at["search_us"] < min(at["alone_us"], at["fa3_us"])


@pytest.mark.parametrize("heads", range(1, 33))
def test_a_number_between_is_judged_as_the_larger(heads: int) -> None:
    """Whatever the query rows of a request, the table's units are its requests."""
    as_many = next(most for most in (8, 16, 32) if heads <= most)
    paths, like = (decode_paths(H200, n, 64, "fa3", (1,)) for n in (heads, as_many))
    assert paths.served[1].rows == like.served[1].rows
    sizes = {8: ((1, None),), 16: ((1, 4), (32, 128)), 32: ((1, 4), (64, 128))}[as_many]
    assert paths.served[1].sizes == sizes
    for low, high in sizes:
        assert paths.covers(1, low) and paths.covers(1, high or 10**9)
        assert high is None or not paths.covers(1, high + 1)


def test_sizes_in_words() -> None:
    of = {n: decode_paths(H200, n, 64, "fa3", (1,)).served[1] for n in (8, 16)}
    assert sizes_in_words(of[8]) == "any number of"
    assert sizes_in_words(of[16]) == "up to 4 and of 32 to 128"
    later = replace(of[16], rows=of[16].rows[1:2] + of[16].rows[:1])
    assert sizes_in_words(later) == "32 and more"


@pytest.mark.parametrize(
    ("target", "heads", "kernel", "why"),
    [
        (KNOWN_TARGETS["B200"], 4, "fa3", "no result compares mla_decode with fa3 on sm100"),
        (H200, 4, "cutlass", "no result compares mla_decode with cutlass on sm90"),
        (H200, 33, "fa3", "its decode was compared with fa3 at up to 32 query rows per request"),
    ],
)
def test_without_a_measurement_nothing_runs_here(
    target: Target, heads: int, kernel: str, why: str
) -> None:
    paths = select_beside("mla_decode", target, {"decode": MlaSpec(heads, 64)}, kernel)
    assert (paths.served, paths.why, paths.covers("decode", 1)) == ({}, why, False)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_limits_of_sparse_mla_are_those_of_the_result_file(phase: str) -> None:
    found: dict[int, dict[int, list[float]]] = {}
    for row in measured(SPARSE):
        if row["phase"] == phase:
            shares = found.setdefault(row["heads"], {}).setdefault(row["batch"], [])
            shares.append(row["ours_gpu_us"] / row["flashmla_gpu_us"])
    assert found
    for heads, batches in found.items():
        paths, most = sparse_paths(H200, heads), ahead(batches)
        if most == 0:
            assert phase in paths.refused
            continue
        selection = paths.served[phase]
        assert (selection.sizes, result_file(selection)) == (((1, most),), SPARSE)


def test_sparse_heads_between_are_judged_as_the_larger() -> None:
    for heads in range(1, 65):
        paths = sparse_paths(H200, heads)
        like = sparse_paths(H200, next(most for most in (16, 32, 64) if heads <= most))
        assert paths.refused == like.refused and paths.served.keys() == like.served.keys()
        for phase, selection in paths.served.items():
            assert selection.rows == like.served[phase].rows
            most = 16 if heads > 32 else None
            assert selection.sizes == ((1, most),) and paths.covers(phase, most or 10**9)
        assert heads <= 32 or not paths.covers("decode", 17)
    measured = (
        "it was compared with flashmla at up to 64 heads per rank in decode and 32 in prefill"
    )
    assert sparse_paths(H200, 33).refused == {"prefill": measured}
    assert sparse_paths(H200, 65).why == measured and not sparse_paths(H200, 65).served
    none = "no result compares sparse_mla with flashmla on gfx950"
    assert sparse_paths(KNOWN_TARGETS["MI355X"], 8).why == none
    assert sparse_paths(H200, 129).why == "num_heads must be 1 to 128, got 129"


def test_what_is_said_of_deepseek_v4() -> None:
    assert FAMILY.model_refusal(DEEPSEEK_V4) is None
    (heads, decodes, prefills), rows = FAMILY.describe_model(H200, DEEPSEEK_V4, 1, "vllm")
    source = SPARSE
    assert heads == "64 heads per GPU"
    assert decodes == (
        f"attention in decodes of up to 16 query tokens, where {source} has them ahead of flashmla"
    )
    assert prefills.startswith("attention in prefills: flashmla, since it was compared")
    assert list(rows) == ["sparse_mla, decode"] and all(
        row.low for row in rows["sparse_mla, decode"]
    )
    notes, rows = FAMILY.describe_model(H200, DEEPSEEK_V4, 8, "vllm")
    assert list(rows) == ["sparse_mla, decode", "sparse_mla, prefill"] and all(rows.values())
    assert notes[1:] == [
        f"attention in {phase}s, where {source} has them ahead of flashmla"
        for phase in ("decode", "prefill")
    ]
    with pytest.raises(LookupError, match="no result compares sparse_mla"):
        FAMILY.describe_model(KNOWN_TARGETS["MI300X"], DEEPSEEK_V4, 1, "vllm")


def test_which_models_have_layers_of_this_family() -> None:
    assert FAMILY.model_refusal(KIMI) is None
    for config in ({}, {**KIMI, "kv_lora_rank": 256}, {**KIMI, "qk_rope_head_dim": 32}):
        assert FAMILY.model_refusal(config) == (
            "MLA decode needs kv_lora_rank 512 and qk_rope_head_dim 64"
        )
    assert "index_topk makes it sparse" in str(FAMILY.model_refusal({**KIMI, "index_topk": 2048}))


def test_what_is_said_of_a_model() -> None:
    (heads, steps), rows = FAMILY.describe_model(H200, KIMI, 1, "vllm")
    paths = [str(row).split(" (")[0] for row in rows["mla_decode"]]
    assert heads == "32 heads per GPU" and paths == [
        "mla_decode grid 1 to 4: sm90 shared_requests=0 shared_tokens=0",
        "mla_decode grid 5 to 63: upstream kernel=fa3",
        "mla_decode grid 64 to 128: sm90 shared_requests=64 shared_tokens=6144",
        "mla_decode grid 129 and more: upstream kernel=fa3",
    ]
    assert steps == (
        "decode steps of up to 4 and of 64 to 128 requests, where"
        " benchmarks/results/mla_decode_h200.json has them ahead of fa3"
    )
    assert "of any number of requests" in FAMILY.describe_model(H200, KIMI, 8, "vllm").notes[1]
    with pytest.raises(ValueError, match="32 heads cannot be split over 5 GPUs"):
        FAMILY.describe_model(H200, KIMI, 5, "vllm")
    with pytest.raises(ValueError, match="the configuration must have num_attention_heads"):
        FAMILY.describe_model(H200, {}, 1, "vllm")
    with pytest.raises(LookupError, match="no result compares"):
        FAMILY.describe_model(KNOWN_TARGETS["MI300X"], KIMI, 1, "vllm")
