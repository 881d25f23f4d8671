"""The benchmark of bounded-gate models without an engine: its attribution, its joining."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bounded_gate_vllm import (
    RANGES,
    attributed,
    joined,
)
from benchmarks.engines.serve_agreement import LONG_PROMPTS, NEW_TOKENS, PROMPTS


def test_kernels_belong_to_the_range_that_launched_them() -> None:
    layers, cores = RANGES
    spans = {layers: [(0, 100), (200, 300)], cores: [(20, 60), (220, 260)]}
    launched = {1: 10, 2: 30, 3: 230, 4: 150, 5: 299}
    ran = [
        (2, "scan", 4_000_000, 1_000_000),
        (1, "gemm", 0, 4_000_000),
        (3, "scan", 6_000_000, 2_000_000),
        (4, "elsewhere", 10_000_000, 9_000_000),  # between two layers
        (5, "gemm", 7_500_000, 1_500_000),  # beside the scan for 0.5 ms
        (6, "copy of the profiler", 1_000_000, 7_000_000),  # whose launch was not seen
    ]
    found = attributed(spans, launched, ran)
    assert found[layers] == (8.0, {"gemm": (5.5, 2), "scan": (3.0, 2)})
    assert found[cores] == (3.0, {"scan": (3.0, 2)})
    with pytest.raises(ValueError, match="expected kernels launched by KDA cores, got none in 1"):
        attributed({layers: [(0, 100)], cores: [(400, 500)]}, launched, ran)


def answers(count: int, *, first: int = 1, margin: float = 3.0) -> list[dict[str, Any]]:
    return [
        {
            "tokens": [first] + [1] * (NEW_TOKENS - 1),
            "best": [[first, 3 - first]] + [[1, 2]] * (NEW_TOKENS - 1),
            "logprobs": [[0.0, -margin]] * NEW_TOKENS,
        }
        for _ in range(count)
    ]


def side(resumed: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "head": {"gpu": "G", "engine": "vllm 0.33.0"},
        "rows": [{"what": "model load", "kind": "load", "ms": 9.0}],
        "layers": {},
        "left_out": [],
        "failed": {},
        "tokens": {"lengths": [3], "together": answers(PROMPTS), "apart": answers(PROMPTS)},
        "long_tokens": {
            "lengths": [3],
            "together": answers(LONG_PROMPTS),
            "apart": answers(LONG_PROMPTS),
            "resumed": resumed,
        },
    }


def test_a_parting_beyond_rounding_is_not_explained() -> None:
    same, other = side(answers(2)), side([*answers(1), *answers(1, first=2)])
    result = joined({("k3_small", "upstream"): same, ("k3_small", "flag"): other})
    assert result["gpu"] == "G" and result["mode"] == "default"
    assert result["rows"] == [
        {
            "model": "k3_small",
            "what": "model load",
            "kind": "load",
            "upstream_ms": 9.0,
            "flag_ms": 9.0,
        }
    ]
    verdicts = {v["what"]: (v["same"], v["partings"], v["explained"]) for v in result["verdicts"]}
    assert verdicts == {
        "upstream and flag, together": (PROMPTS, 0, True),
        "upstream and flag, apart": (PROMPTS, 0, True),
        "upstream and flag, together, long prompts": (LONG_PROMPTS, 0, True),
        "upstream and flag, apart, long prompts": (LONG_PROMPTS, 0, True),
        "upstream and flag, resumed, long prompts": (1, 1, False),
    }
