"""The planner's and combine's CUDA sources on the CPU (tools/cuda_on_host), compared with torch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from backend_core.launch.cuda_params import CudaParams
from mla_backend import combine, reference
from mla_backend.plan import fill
from mla_backend.plan.split_kv import split_kv
from tools.cuda_on_host.driver import GXX, HostKernel
from tools.cuda_on_host.planted import plant

CTAS = 132

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


def pack(params: CudaParams, *values: int) -> bytes:
    given = dict(zip(params.names, values, strict=True))
    filled = [given.pop(name) for name in params.addresses]
    return params.at({}, **given)(*filled)


@pytest.mark.parametrize("threads", [256, 544])
@pytest.mark.parametrize(
    ("lengths", "prefixes", "overhead", "min_blocks"),
    [
        ([65536] + [1024] * 63, [], 1, 1),
        ([0, 1, 63, 64, 65, 4000, 0, 130], [], 3, 2),
        ([100 * i % 7777 for i in range(600)], [], 5, 4),
        ([512] * 64, [16384] * 4 + [-1] * 30, 1, 1),
        ([512] * 64, [-1] * 34, 1, 1),
        ([60, 7000, 70], [65536, -1], 2, 3),
    ],
)
def test_the_planner_is_the_one_in_torch(
    seed: int,
    lengths: list[int],
    prefixes: list[int],
    overhead: int,
    min_blocks: int,
    threads: int,
) -> None:
    """The requests' tiles, and the prefixes' in a list of their own, of at most 26 splits each."""
    tokens = torch.tensor(lengths + prefixes, dtype=torch.int32)
    requests, slot = len(lengths), 500
    prefix = torch.full((requests,), -1, dtype=torch.int32)
    prefix[::7] = requests + 1
    work = torch.full((2 * CTAS, 8), -7, dtype=torch.int32)
    num_splits = torch.full((len(tokens) + 2,), -7, dtype=torch.int32)
    merges = torch.full((requests + 1,), -7, dtype=torch.int32)
    params = pack(fill.PARAMS, 
        *(x.data_ptr() for x in (tokens, work, num_splits, merges, prefix)),
        requests, len(prefixes), slot, requests, CTAS, overhead, min_blocks,
    )  # fmt: skip
    kernel = HostKernel(fill.SM90_SOURCE, "split_plan", fill.PARAMS, {}, run_seed=seed)
    kernel(2 if prefixes else 1, threads, params)
    want_work, want_splits = split_kv(tokens[:requests], CTAS, overhead, min_blocks)
    assert torch.equal(work[:CTAS], want_work)
    assert torch.equal(num_splits[: requests + 1], want_splits)
    splits = want_splits.diff()
    merged = ((splits > 1) | (prefix >= 0)).nonzero().flatten().int()
    assert merges[0] == len(merged)
    assert torch.equal(merges[1 : 1 + len(merged)], merged)
    if not prefixes:
        assert (work[CTAS:] == -7).all()
        return
    longest = -(-max(*prefixes, 0) // 64)
    if longest:
        least = max(min_blocks, -(-longest // 24))
        want_work, want_splits = split_kv(tokens[requests:], CTAS, overhead, least)
        assert torch.equal(work[CTAS:], want_work)
        assert torch.equal(num_splits[requests + 1 :], want_splits + slot)
        assert int(want_splits.diff().max()) <= 26
    else:
        assert (work[CTAS:, 0] > work[CTAS:, 2]).all()  # nothing to compute


@pytest.mark.parametrize(
    ("ctas", "many", "listed"), [(3, 528, True), (7, 528, False), (96, 528, True), (4, 0, True)]
)
def test_combine_is_the_reference(
    tmp_path: Path, ctas: int, many: int, listed: bool, seed: int
) -> None:
    """Splits: one (left alone), few, 160; two levels; empty and poisoned ones. A warp has some
    splits of a quarter of a row, a CTA a slice of a row (96), or a warp a row (many = 0)."""
    folder = combine.SM90_SOURCE.parent
    folder = plant(folder, tmp_path, "mla_combine.cu", "MANY = 528;", f"MANY = {many};")
    source = folder / "mla_combine.cu"
    kernel = HostKernel(source, "mla_combine", combine.PARAMS, {}, run_seed=seed)
    generator = torch.Generator().manual_seed(seed)
    heads, counts = 2, [1, 3, 2, 40, 160, 1, 5]
    requests, slots = len(counts), sum(counts) + 4
    partial_out = torch.randn(slots, 64, 512, generator=generator)
    partial_lse = torch.randn(slots, 64, generator=generator) * 8
    num_splits = torch.tensor([0, *counts, 4], dtype=torch.int32).cumsum(0).int()
    prefix_tile = torch.tensor([-1, -1, -1, -1, -1, 7, 7], dtype=torch.int32)
    prefix_row = torch.tensor([0, 0, 0, 0, 0, 8, 11], dtype=torch.int32)
    partial_lse[2] = -math.inf  # one empty split
    partial_out[2] = math.nan
    partial_lse[4:6] = -math.inf  # all of request 2
    partial_out[4:6] = math.nan
    sinks = torch.randn(heads, generator=generator)
    merged = torch.tensor([6, 1, 2, 3, 4, 5, 6], dtype=torch.int32)
    out = torch.full((requests, heads, 512), math.nan, dtype=torch.bfloat16)
    lse = torch.full((requests, heads), math.nan)
    params = pack(combine.PARAMS, 
        *(x.data_ptr() for x in (out, lse, partial_out, partial_lse, num_splits)),
        merged.data_ptr() if listed else 0,
        *(x.data_ptr() for x in (prefix_tile, prefix_row, sinks)),
        requests, heads, 64, heads,
    )  # fmt: skip
    kernel(ctas, 256, params)
    assert out[0].isnan().all() and lse[0].isnan().all()  # the main kernel's own
    for request in range(1, requests):
        slot = int(num_splits[request])
        own = slice(slot, slot + counts[request])
        rows, lses = partial_out[own, :heads], partial_lse[own, :heads]
        if prefix_tile[request] >= 0:
            at = slice(int(prefix_row[request]), int(prefix_row[request]) + heads)
            shared = slice(int(num_splits[7]), int(num_splits[8]))
            rows = torch.cat([partial_out[shared, at], rows])
            lses = torch.cat([partial_lse[shared, at], lses])
        want_out, want_lse = reference.combine(rows, lses, sinks)
        torch.testing.assert_close(lse[request].double(), want_lse, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(out[request].double(), want_out, atol=1e-2, rtol=1e-2)
