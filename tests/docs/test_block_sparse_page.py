"""The picture and the tables of block-sparse attention."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import plot_sparse_attention as plot
from docs.performance_parts import block_sparse


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


def test_what_was_not_built_is_on_the_page() -> None:
    report = {"rows": [row("dense", 4096, 1.0, "gluon", 7.0)], "not_built": {"Peer": "no nvcc"}}
    lines = block_sparse.attention({"gpu": "", "torch": "", "triton": "", "date": "", **report})
    assert "Not built: Peer: no nvcc." in lines
    assert any("7.00" in line for line in lines)


def test_wrong_times_of_a_peer_are_not_on_the_page() -> None:
    rows = [row("random blocks", 115200, x, "gluon", 1.0, FlexAttention=39.4) for x in (0.1, 0.75)]
    assert [bool(block_sparse._right_peers(found)) for found in rows] == [True, False]
    text = "\n".join(block_sparse.built_peers())
    assert "FlexAttention 40.02" in text and "FlexAttention 39." not in text
