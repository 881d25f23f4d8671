"""Where engines are served: the path table's rows upstream say what the result files have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from backend_core.operator import Lead
from backend_core.target import KNOWN_TARGETS
from mla_backend.api import decode_lead, select_mla_decode
from mla_backend.engines.sparse_layer import sparse_leads
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
    lead = decode_lead(H200, rows, "fa3")
    assert (lead.sizes[0], lead.why) == ((1, ahead(shares(rows))), MLA)


@pytest.mark.parametrize("heads", [4, 8, 16, 32])
def test_shared_prompts_are_looked_for_where_that_was_faster(heads: int) -> None:
    """At the fewest requests and tokens of a row, between two that were measured, the search is no
    slower than FlashAttention 3 and than a plan without it."""
    points = {(r["requests"], r["shared"]): r for r in measured(SHARED) if r["heads"] == heads}
    selection = select_mla_decode(H200, MlaSpec(heads, 64), "fa3")
    found = [row.params for row in selection.rows if row.name != "upstream"]
    searching = [params for params in found if params.shared_requests]
    assert searching
    for params in searching:
        low, high = points[params.shared_requests, 2048], points[params.shared_requests, 8192]
        part = (params.shared_tokens - 2048) / (8192 - 2048)
        at = {key: low[key] + part * (high[key] - low[key]) for key in low if key.endswith("_us")}
        assert 0 < part < 1 and at["search_us"] < min(at["alone_us"], at["fa3_us"])


@pytest.mark.parametrize(("rows", "most"), [(1, None), (5, None), (9, 4), (16, 4), (17, 4)])
def test_a_number_between_is_judged_as_the_larger(rows: int, most: int | None) -> None:
    lead = decode_lead(H200, rows, "fa3")
    assert lead.sizes[0] == (1, most)
    assert lead.covers(4) and lead.covers(1000) == lead.covers(257) == (most is None)
    assert lead.covers(17) == (most is None)


def test_without_a_measurement_there_is_no_lead() -> None:
    for target, heads, kernel, why in (
        (KNOWN_TARGETS["B200"], 4, "fa3", "no result compares mla_decode with fa3 on sm100"),
        (H200, 4, "cutlass", "no result compares mla_decode with cutlass on sm90"),
        (
            *(H200, 33, "fa3"),
            "its decode was compared with fa3 at up to 32 query rows per request, and this rank"
            " has 33",
        ),
    ):
        assert decode_lead(target, heads, kernel) == Lead((), why)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_limits_of_sparse_mla_are_those_of_the_result_file(phase: str) -> None:
    found: dict[int, dict[int, list[float]]] = {}
    for row in measured(SPARSE):
        if row["phase"] == phase:
            shares = found.setdefault(row["heads"], {}).setdefault(row["batch"], [])
            shares.append(row["ours_gpu_us"] / row["flashmla_gpu_us"])
    assert found
    for heads, batches in found.items():
        assert sparse_leads(H200, heads)[phase] == Lead(((1, ahead(batches)),), SPARSE)


def test_sparse_heads_between_are_judged_as_the_larger() -> None:
    for heads, phase, lead in (
        (5, "decode", Lead(((1, None),), SPARSE)),
        (33, "decode", Lead(((1, 16),), SPARSE)),
        (8, "prefill", Lead(((1, None),), SPARSE)),
        (
            *(33, "prefill"),
            Lead(
                (),
                "its sparse prefill was compared with flashmla at up to 32 heads per rank, and"
                " this rank has 33",
            ),
        ),
    ):
        assert sparse_leads(H200, heads)[phase] == lead
    assert sparse_leads(KNOWN_TARGETS["MI355X"], 8)["decode"] == Lead(
        (), "no result compares sparse_mla with flashmla on gfx950"
    )


def test_what_is_said_of_deepseek_v4() -> None:
    assert FAMILY.model_refusal(DEEPSEEK_V4) is None
    heads, decodes, prefills, *rows = FAMILY.describe_model(H200, DEEPSEEK_V4, 1)
    source = SPARSE
    assert heads == "64 heads per GPU"
    assert decodes == (
        f"attention in decodes of up to 16 query tokens, where {source} has them ahead of flashmla"
    )
    assert prefills.startswith("attention in prefills: flashmla, since its sparse prefill was")
    assert all(row.startswith("sparse_mla grid ") for row in rows) and rows
    assert FAMILY.describe_model(H200, DEEPSEEK_V4, 8)[1:3] == [
        f"attention in {phase}s, where {source} has them ahead of flashmla"
        for phase in ("decode", "prefill")
    ]
    with pytest.raises(LookupError, match="no result compares sparse_mla"):
        FAMILY.describe_model(KNOWN_TARGETS["MI300X"], DEEPSEEK_V4, 1)


def test_which_models_have_layers_of_this_family() -> None:
    assert FAMILY.model_refusal(KIMI) is None
    for config in ({}, {**KIMI, "kv_lora_rank": 256}, {**KIMI, "qk_rope_head_dim": 32}):
        assert FAMILY.model_refusal(config) == (
            "MLA decode needs kv_lora_rank 512 and qk_rope_head_dim 64"
        )
    assert "index_topk makes it sparse" in str(FAMILY.model_refusal({**KIMI, "index_topk": 2048}))


def test_what_is_said_of_a_model() -> None:
    heads, steps, *paths = FAMILY.describe_model(H200, KIMI, 1)
    assert heads == "32 heads per GPU" and [path.split(" (")[0] for path in paths] == [
        "mla_decode grid 1 to 128: sm90 overhead=1 min_blocks=1 shared_requests=0 shared_tokens=0",
        "mla_decode grid 129 to 2016: upstream kernel=fa3",
        "mla_decode grid 2017 to 4096: sm90 overhead=1 min_blocks=1 shared_requests=64"
        " shared_tokens=6144",
        "mla_decode grid 4097 and more: upstream kernel=fa3",
    ]
    assert steps == (
        "decode steps of up to 4 and of 64 to 128 requests, where"
        " benchmarks/results/mla_decode_h200.json has them ahead of fa3"
    )
    assert "of any number of requests" in FAMILY.describe_model(H200, KIMI, 8)[1]
    with pytest.raises(ValueError, match="32 heads cannot be split over 5 GPUs"):
        FAMILY.describe_model(H200, KIMI, 5)
    with pytest.raises(ValueError, match="the configuration must have num_attention_heads"):
        FAMILY.describe_model(H200, {}, 1)
    with pytest.raises(LookupError, match="no result compares"):
        FAMILY.describe_model(KNOWN_TARGETS["MI300X"], KIMI, 1)
