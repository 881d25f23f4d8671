"""The long-context decode benchmark without an engine: how sides are joined."""

from __future__ import annotations

from typing import Any

from benchmarks import mla_vllm


def side(**times: float) -> dict[str, Any]:
    rows = [
        {"what": f"{batch[1:]} x 65536", "kind": "decode", "ms": ms} for batch, ms in times.items()
    ]
    head = {"gpu": "G", "engine": "vllm 0.33.0", "torch": "t", "triton": "u", "date": "d"}
    return {"head": head, "rows": rows}


def test_sides_are_joined_by_batch_and_context() -> None:
    result = mla_vllm.joined({"upstream": side(b1=4.0, b16=13.0), "flag": side(b1=3.2)})
    assert [result[k] for k in ("gpu", "engine", "context_by")] == [
        "G",
        "vllm 0.33.0",
        "benchmarks/engines/context_connector.py",
    ]
    points = [(row["batch"], row["context"]) for row in result["rows"]]
    assert points == [(1, 65536), (16, 65536)]
    times = [(row["upstream_ms"], row.get("flag_ms")) for row in result["rows"]]
    assert times == [(4.0, 3.2), (13.0, None)]
