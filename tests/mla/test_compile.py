"""The Triton kernels compile for GPUs that are not there, to what the committed report says."""

from __future__ import annotations

import json

import pytest
import triton

from tests.mla.compile_report import QUICK, REPORT
from tests.offline import ALL, SHARED_LIMIT, TARGETS, report_of

MAY_SPILL = {
    "sparse_mla_sm90 64 heads, split, two caches": 150,
    "sparse_mla_sm90 64 heads, two caches, sinks": 80,
    "sparse_mla_sm90 32 heads, rows of bf16, sinks": 5,
    "sm80 paged_attention 32/8 heads of 128, page 16": 3,
    "sm86 mla_decode 64 heads, page 1": 18,
    "sm89 mla_decode 64 heads, page 1": 18,
    "sm90 mla_decode 16 heads, two levels, sinks": 26,
    "sparse_mla_sm90 64 heads, 128 requests, two caches, sinks": 160,
    "sparse_mla_sm90 32 heads, split, two caches": 5,
    "sparse_mla_sm90 16 heads, rows of bf16, sinks": 5,
    "sm80 sparse_mla_combine, 16 splits, sinks": 3,
}
"""Loads and stores of spilled registers, nearly all outside the loop over blocks: a product's
[512, 64] takes 128 registers of a thread."""
COMPILED_AGAIN = tuple(TARGETS) if ALL else ("gfx942:quick",)
"""All of it takes minutes: by default some kernels for one architecture."""


def test_nothing_in_the_report_spills_or_overflows() -> None:
    committed = json.loads(REPORT.read_text())
    for arch, limit in SHARED_LIMIT.items():
        for name, kernel in committed[arch].items():
            assert kernel["shared"] <= limit, f"{arch} {name}"
            allowed = MAY_SPILL.get(name, MAY_SPILL.get(f"{arch} {name}", 0))
            assert kernel["spills"] <= allowed, f"{arch} {name}"
            assert allowed or kernel["stack"] == 0, f"{arch} {name}"


@pytest.mark.parametrize("target", COMPILED_AGAIN)
def test_kernels_compile_to_what_the_report_says(target: str) -> None:
    committed = json.loads(REPORT.read_text())
    if committed["triton"] != triton.__version__:
        pytest.skip(f"the report is of Triton {committed['triton']}")
    arch, _, quick = target.partition(":")
    fresh = report_of("tests.mla.compile_report", target)
    wanted = {name: committed[arch][name] for name in (QUICK if quick else committed[arch])}
    assert fresh == wanted
