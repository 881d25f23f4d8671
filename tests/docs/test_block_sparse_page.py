"""The picture and the tables of block-sparse attention."""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks import plot_sparse_attention as plot
from benchmarks import token_orders
from docs.performance_parts import block_sparse
from softmax_backend.plan.token_order import hilbert_order, tile_order


def test_the_picture_is_of_the_result() -> None:
    result = json.loads(plot.RESULT.read_text(encoding="utf-8"))
    drawn = f"drawn from {plot.digest(result)}"
    assert drawn in plot.IMAGE.read_text(encoding="utf-8"), (
        "run python -m benchmarks.plot_sparse_attention"
    )


def row(work: str, tokens: int, density: float, path: str, ms: float, **peers: float) -> Any:
    shape = f"{tokens} tokens, 24 heads"
    times = {"ours_ms": ms, "ours_whole_ms": ms, "tflops": None, "mass_kept": None}
    return {"work": work, "shape": shape, "density": density, "path": path, "peers": peers, **times}


def test_rows_of_growth_are_drawn_against_tokens() -> None:
    rows = [row("causal", 4096, 0.5, "gluon", 9.0)]
    for tokens in (1024, 2048, 4096):
        rows.append(row("random blocks", tokens, 0.25, "gluon", tokens / 1024, FlexAttention=8.0))
        rows.append(row("random blocks", tokens, 0.25, "gluon in step", 0.5))
        rows.append(row("random blocks 8-bit", tokens, 0.251, "int8 per_warp", 0.5, SpargeAttn=2.0))
    title, found = plot.by_tokens({"rows": rows})
    assert title == "a quarter of the blocks, 24 heads"
    assert found["gluon"] == {1024: 1.0, 2048: 2.0, 4096: 4.0}
    assert set(found) == {"gluon", "int8 per_warp", "FlexAttention", "SpargeAttn"}
    assert plot.by_tokens({"rows": rows[:4]})[0] == "causal, 24 heads"
    title, found = plot.by_density({"rows": [*rows, row("dense", 4096, 1.0, "gluon", 7.0, FA3=6)]})
    assert title == "4,096 tokens, 24 heads"
    assert found["gluon"] == {0.25: 4.0, 1.0: 7.0} and found["FA3"] == {1.0: 6}


def test_what_was_not_built_is_on_the_page() -> None:
    report = {"rows": [row("dense", 4096, 1.0, "gluon", 7.0)], "not_built": {"Peer": "no nvcc"}}
    lines = block_sparse.attention({"gpu": "", "torch": "", "triton": "", "date": "", **report})
    assert "Not built: Peer: no nvcc." in lines
    assert any("7.00" in line for line in lines)


def test_blocks_on_the_curve_are_cubes() -> None:
    """The page says so of boxes whose sides are multiples of 4."""
    box = (8, 12, 20)
    cubes = tile_order(box, (4, 4, 4), block=64, device="cpu").index.view(-1, 64)
    curve = hilbert_order(box, "cpu")[0].view(-1, 64)
    blocks = [{tuple(sorted(block)) for block in order.tolist()} for order in (cubes, curve)]
    assert blocks[0] == blocks[1]


def test_an_order_that_keeps_neighbours_together_keeps_more() -> None:
    generator = torch.Generator().manual_seed(0)
    box = (4, 8, 16)
    q, k = token_orders.field(box, "place", 4.0, 1, generator)
    found = {
        name: token_orders.measure(q[:, :, at], k[:, :, at])
        for name, at in token_orders.orders(box, generator).items()
    }
    cubes, raster, shuffled = (found[x] for x in ("tiles of 4 x 4 x 4", "raster", "random"))
    key = f"density_for_{token_orders.MASS}"
    assert cubes[key] < 0.8 * raster[key] < 0.8 * shuffled[key]
    assert found["hilbert"][key] == cubes[key]
    for line in found.values():
        for kept in line["kept"]:  # no prediction keeps more than the best choice
            assert kept["predicted"] <= kept["best"] + 1e-4
    assert cubes["kept"][-1]["predicted"] > 2 * shuffled["kept"][-1]["predicted"]
