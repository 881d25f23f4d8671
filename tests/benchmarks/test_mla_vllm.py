"""The long-context decode benchmark without an engine: how sides are joined, what is checked."""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks import mla_vllm


def side(**times: float) -> dict[str, Any]:
    rows = [
        {"what": what, "ms": ms, "batch": int(what.split("x")[0][1:]), "context": 65536}
        for what, ms in times.items()
    ]
    return {
        "head": {"gpu": "G", "engine": "vllm 0.33.0", "torch": "t", "triton": "u", "date": "d"},
        "context_by": "prefill",
        "rows": rows,
    }


def test_sides_are_joined_by_batch_and_context() -> None:
    sides = {"upstream": side(b1x=4.0, b16x=13.0), "flag": side(b1x=3.2)}
    result = mla_vllm.joined(sides)
    assert [result[k] for k in ("gpu", "engine", "script", "mode", "context_by")] == [
        "G",
        "vllm 0.33.0",
        "benchmarks/mla_vllm.py",
        "default",
        "prefill",
    ]
    assert result["rows"] == [
        {"batch": 1, "context": 65536, "upstream_ms": 4.0, "flag_ms": 3.2},
        {"batch": 16, "context": 65536, "upstream_ms": 13.0},
    ]


def test_the_check_sees_wrong_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.full((5, 16, 576), float("nan"))
    cache[1, :].normal_(generator=generator)
    cache[3, :5].normal_(generator=generator)
    table = torch.tensor([[1, 3], [0, 0]], dtype=torch.int32)
    q = torch.randn(2, 4, 576, generator=generator)
    keys = torch.cat([cache[1], cache[3, :5]])
    out = torch.zeros(2, 4, 512)
    out[0] = (q[0] @ keys.T * 192**-0.5).softmax(-1) @ keys[:, :512]
    assert mla_vllm.worst(out, q, cache, table, [21, 0]) < 1e-4
    out[0] *= 1.02
    assert 0.01 < mla_vllm.worst(out, q, cache, table, [21, 0]) < 0.03
    out[1, 0, 0] = 1.0
    assert mla_vllm.worst(out, q, cache, table, [21, 0]) == math.inf
    out[:] = math.nan
    assert mla_vllm.worst(out, q, cache, table, [21, 0]) == math.inf
