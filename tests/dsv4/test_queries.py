"""The indexer's queries against float64, and what rotating one side or both does to the top-k."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend_core.operator import forced, select
from backend_core.target import KNOWN_TARGETS, Target
from dsv4_backend import quantise_indexer_queries, reference
from dsv4_backend.launch_params import TABLES
from tests.dsv4.cases import DEVICE, TARGET, make_spec, rope_table

CPU = KNOWN_TARGETS["cpu"]


def draw(tokens: int = 5, heads: int = 3, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads + 1, 160, generator=g) * 4
    q = x.to(dtype).to(DEVICE)[:, :heads, 16:144]  # neither packed rows nor packed heads
    positions = torch.randint(0, 1000, (tokens,), generator=g).to(DEVICE)
    weights = torch.randn(tokens, heads, generator=g).to(DEVICE)
    return q, positions, weights


@pytest.mark.parametrize("target", [CPU, TARGET], ids=["torch", "triton"])
@pytest.mark.parametrize("cache_format", ["indexer_fp8", "indexer_mxfp4"])
def test_no_token(cache_format: str, target: Target) -> None:
    spec, (q, positions, weights) = make_spec(cache_format), draw(0)
    arguments = (q, positions, rope_table(), weights, 128**-0.5, 64**-0.5)
    codes, scales, out = quantise_indexer_queries(spec, *arguments, target=target)
    assert codes.shape == (0, 3, 128 if scales is None else 64) and out.shape == (0, 3)
    assert scales is None or scales.shape == (0, 3, 4)


@pytest.mark.interpreter  # asks for memory that is never touched
def test_heads_far_apart_are_refused() -> None:
    """The kernel counts from head to head in int32."""
    q, positions, weights = draw()
    far = torch.empty(2**31 + 128, dtype=torch.bfloat16).as_strided(q.shape, (0, 2**30, 1))
    arguments = (far, positions, rope_table(), weights, 128**-0.5, 64**-0.5)
    with pytest.raises(ValueError, match=r"q must span fewer than 2\*\*31 elements"):
        quantise_indexer_queries(make_spec("indexer_fp8"), *arguments, target=TARGET)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("rounding", ["vllm", "sglang"])
@pytest.mark.parametrize("cache_format", ["indexer_fp8", "indexer_mxfp4"])
def test_bytes(cache_format: str, rounding: str, rotate: bool) -> None:
    layout = "split" if rounding == "vllm" else "interleaved"
    spec = make_spec(cache_format, rounding=rounding, rotate=rotate, rope_layout=layout)
    q, positions, weights = draw()
    table = rope_table(layout, torch.Generator().manual_seed(1))
    arguments = (q, positions, table, weights, 128**-0.5, 64**-0.5)
    codes, scales, out = quantise_indexer_queries(spec, *arguments, target=TARGET)
    rows = reference.rope(
        q.double().reshape(-1, 128), table, positions.repeat_interleave(3), layout
    )
    rows = reference.hadamard(rows) if rotate else rows
    want, want_scales = reference.quantise(rows, spec)
    assert (codes.view(15, -1) == want).float().mean() > 0.995
    plain = weights.double() * 128**-0.5 * 64**-0.5
    if cache_format == "indexer_fp8":
        assert scales is None
        plain *= want_scales.contiguous().view(torch.float32).view(5, 3)
        got_scales = want_scales
    else:
        got_scales = scales.view(15, -1)
        assert torch.equal(got_scales, want_scales)
    torch.testing.assert_close(out.double(), plain, rtol=1e-6, atol=0)
    got = reference.dequantise(codes.reshape(15, -1), got_scales, spec)
    error = (got.double() - rows).norm() / rows.norm()
    assert error < (0.04 if cache_format == "indexer_fp8" else 0.16)


@pytest.mark.parametrize("cache_format", ["indexer_fp8", "indexer_mxfp4"])
def test_heads_per_program_change_nothing(cache_format: str) -> None:
    spec = make_spec(cache_format, rope_layout="split")
    q, positions, weights = draw(tokens=2, heads=7)
    arguments = (spec, q, positions, rope_table("split"), weights, 0.1, 0.5)
    path, results = select(TABLES, "queries", TARGET, None).row(1), []
    for heads in (1, 2, 4):
        params = dataclasses.replace(path.params, heads=heads)
        alone = forced(TABLES, TARGET, None, dataclasses.replace(path, params=params))
        results.append(quantise_indexer_queries(*arguments, target=TARGET, selection=alone))
    for codes, scales, out in results[1:]:
        want_codes, want_scales, want_out = results[0]
        # compilers may fuse a product and a sum in one of two ways
        assert (codes == want_codes).float().mean() > 0.999
        assert scales is None or torch.equal(scales, want_scales)
        torch.testing.assert_close(out, want_out, rtol=1e-6, atol=0)


def test_fp32_queries() -> None:
    spec = make_spec("indexer_fp8", rope_layout="split")
    table = rope_table("split")
    q, positions, weights = draw(dtype=torch.float32)
    codes, _, out = quantise_indexer_queries(
        spec, q, positions, table, weights, 1.0, 1.0, target=TARGET
    )
    want, _, want_out = quantise_indexer_queries(
        spec, q.cpu(), positions.cpu(), table.cpu(), weights.cpu(), 1.0, 1.0
    )
    assert (codes.cpu() == want).float().mean() > 0.995
    torch.testing.assert_close(out.cpu(), want_out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 64)}, "q must have shape"),
        ({"q": torch.zeros(2, 3, 128, dtype=torch.float16)}, "q must have dtype"),
        ({"q": torch.zeros(2, 128, 3).transpose(1, 2)}, "q must have stride 1 in dimension 2"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions must have shape"),
        ({"rope_table": torch.zeros(9, 32)}, "rope_table must have shape"),
        ({"weights": torch.zeros(2, 4)}, "weights must have shape"),
        ({"spec": make_spec("fp8_ds_mla")}, "spec must be an indexer's"),
    ],
)
def test_what_breaks_the_contract(change: dict, message: str) -> None:
    arguments = {
        "spec": make_spec("indexer_fp8"),
        "q": torch.zeros(2, 3, 128),
        "positions": torch.zeros(2, dtype=torch.int64),
        "rope_table": torch.zeros(9, 64),
        "weights": torch.zeros(2, 3),
    } | change
    with pytest.raises(ValueError, match=message):
        quantise_indexer_queries(**arguments, softmax_scale=1.0, head_scale=1.0)


def recall(rotate_keys: bool, rotate_queries: bool) -> float:
    """Share of the exact top 64 of 2,048 keys that fp4 finds; three channels have outliers."""
    g = torch.Generator().manual_seed(2)
    scale = torch.ones(128)
    scale[[5, 40, 90]] = 20.0
    keys = torch.randn(2048, 128, generator=g) * scale
    queries = torch.randn(32, 128, generator=g)

    def through(x: torch.Tensor, rotate: bool) -> torch.Tensor:
        spec = dataclasses.replace(make_spec("indexer_mxfp4"), rotate=rotate)
        x = reference.hadamard(x.double()) if rotate else x.double()
        return reference.dequantise(*reference.quantise(x, spec), spec)

    exact = (queries @ keys.T).topk(64).indices
    found = (through(queries, rotate_queries) @ through(keys, rotate_keys).T).topk(64).indices
    return float((exact[:, :, None] == found[:, None]).any(2).float().mean())


def test_rotation_is_a_property_of_both_sides() -> None:
    plain, both = recall(False, False), recall(True, True)
    assert both > plain + 0.02, (plain, both)
    assert max(recall(True, False), recall(False, True)) < 0.4
