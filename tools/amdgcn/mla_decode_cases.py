"""Decode: MLA's plans and caches, sparse MLA, cascades and merges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from backend_core import operator
from backend_core.tables.schema import Row
from backend_core.target import Target
from mla_backend import reference
from mla_backend import reference_sparse_mla as sparse_reference
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.drop_ins import flashinfer
from mla_backend.drop_ins.flashinfer.merge import merge_states
from mla_backend.launch_params import TABLES
from mla_backend.plan import MlaPlanner, fill
from mla_backend.plan.split_kv import split_kv
from mla_backend.sparse_mla import SparseMlaSelection, sparse_mla
from mla_backend.spec import MlaSpec
from mla_backend.spec_sparse_mla import SparseMlaSpec
from mla_backend.testing import sparse_mla_cases as sparse
from mla_backend.testing.cases import assert_close, expected, make_case, run_case
from mla_backend.testing.checks import ALLOWED
from tools.amdgcn.case import Answer, error_of

Cases = dict[str, Callable[[Target], Answer]]


def decode_cases(row: Row) -> Cases:
    """Cases that the kit lacks: plans, page sizes, dtypes and sinks."""
    table: dict[str, tuple[MlaSpec, list[int], dict[str, Any], bool]] = {
        "two levels, sinks": (MlaSpec(20, 16), [80, 40, 130, 70], {}, True),
        "pages of one token": (MlaSpec(64, 1), [40, 0], {}, False),
        "drafts of 2, fp16": (
            MlaSpec(4, 64, query_tokens=2, dtype=torch.float16),
            [100, 2, 70],
            {},
            False,
        ),
        "fp32": (MlaSpec(4, 64, dtype=torch.float32), [70, 0], {}, False),
        "sinks": (MlaSpec(4, 64), [130, 10, 0], {}, True),
    }
    cases: Cases = {}
    for name, (spec, lengths, options, has_sinks) in table.items():
        if "two levels" in name:
            options = options | {"shared_prefix_tokens": 64}

        def run(
            target: Target,
            spec: MlaSpec = spec,
            lengths: list[int] = lengths,
            options: dict[str, Any] = options,
            has_sinks: bool = has_sinks,
        ) -> Answer:
            return _decode(row, target, spec, lengths, options, has_sinks)

        cases[f"mla_decode: {name}"] = run
    return cases | {"mla_decode: plans of 128 requests": lambda target: _plans(row, target)}


def _plans(row: Row, target: Target) -> Answer:
    """The schedule for a GPU of 256 compute units, beside that in torch. Exact."""
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(0, 9000, (128,), generator=generator, dtype=torch.int32)
    full = dataclasses.replace(target, num_sms=256)
    selection = operator.forced(TABLES, full, MlaSpec(4, 64), row)
    work, num_splits = split_kv(lengths, 256, fill.OVERHEAD, fill.MIN_BLOCKS)
    plan = MlaPlanner(selection).plan(lengths)
    wrong = int((plan.work != work).sum()) + int((plan.num_splits != num_splits).sum())
    return float(wrong), 0.5


def _decode(
    row: Row,
    target: Target,
    spec: MlaSpec,
    lengths: list[int],
    options: dict[str, Any],
    has_sinks: bool,
) -> Answer:
    shared = 64 if "shared_prefix_tokens" in options else 0
    case = make_case(spec, lengths, shared_tokens=shared)
    planner = MlaPlanner(operator.forced(TABLES, target, spec, row), **options)
    sinks = torch.linspace(-1, 2, spec.num_heads) if has_sinks else None
    plan = planner.plan(case.lengths, case.block_table)
    if shared and not (plan.prefix is not None and bool((plan.prefix.prefix_tile >= 0).any())):
        raise RuntimeError("no shared prefix was found")
    got = run_case(case, planner, sinks=sinks, plan=plan)
    want = expected(case, sinks=sinks)
    assert_close(got, want, ALLOWED)
    return error_of(got[0], want[0]), ALLOWED


def sparse_cases(row: Row) -> Cases:
    """Cases that the kit lacks: all heads of DeepSeek-V4, other pages, every code of a record."""
    selections: Callable[[Target, SparseMlaSpec], SparseMlaSelection]
    selections = lambda target, spec: operator.forced(TABLES, target, spec, row)  # noqa: E731

    def many_heads(target: Target) -> Answer:
        case = sparse.make_case(128, [(64, 40, [40]), (2, 20, [20])], requests=1)
        got = sparse.run_case(case, selections(target, case.spec))
        return _sparse_answer(got, sparse.expected(case))

    def pages_of_61(target: Target) -> Answer:
        case = sparse.make_case(16, [(61, 70, [70, 5, 0])], has_sinks=True)
        got = sparse.run_case(case, selections(target, case.spec), 1)
        return _sparse_answer(got, sparse.expected(case))

    return {
        "sparse_mla: 128 heads": many_heads,
        "sparse_mla: pages of 61, sinks": pages_of_61,
        "sparse_mla: every code and scale": lambda target: _every_code(
            selections(target, SparseMlaSpec(1, page_size=64))
        ),
        "sparse_mla: rows of bf16, sinks": lambda target: _rows(
            selections(target, SparseMlaSpec(20, "bf16_rows"))
        ),
    }


def _sparse_answer(got: sparse.Result, want: sparse.Result) -> Answer:
    if found := sparse.disagreement(got, want):
        raise RuntimeError(f"beyond FlashMLA's tolerances: {found}")
    return error_of(got[0], want[0]), ALLOWED


def _every_code(selection: SparseMlaSelection) -> Answer:
    """All 254 finite e4m3 codes under scales of 2^-127 to 2^100; exact but for rounding to bf16."""
    cache = sparse.write_records(torch.zeros(1, 64, 512))
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    cache.as_strided((64, 576), (576, 1))[:, :448] = torch.cat([codes, codes[:192]])
    scales = cache.as_strided((64, 8), (8, 1), 64 * 576)
    scales[:] = (torch.arange(64) * 3 + 30).clamp(max=227).to(torch.uint8)[:, None]
    scales[0], scales[1] = 0, 1
    chosen = torch.tensor([0, 1, 2, 20, 33, 50, 63])
    q = torch.zeros(len(chosen), 1, 1, 512, dtype=torch.bfloat16)
    rows = NamedRows(cache, chosen.int().view(-1, 1, 1))
    out, _ = sparse_mla(q, rows, selection, scale=sparse.SCALE, splits=1)
    plain = sparse_reference.read_records(cache).view(-1, 512)
    want = plain[chosen].float().bfloat16().float()
    usual = want.abs() >= 2.0**-126  # a GPU may flush smaller ones
    wrong = int((out.view(-1, 512).float() != want)[usual].sum())
    wrong += int((out.view(-1, 512).float()[~usual].abs() > 2.0**-126).sum())
    return float(wrong), 0.5


def _rows(selection: SparseMlaSelection) -> Answer:
    """A row that no index names is NaN; one token's list has no valid entry."""
    generator = torch.Generator().manual_seed(3)
    kv = (0.1 * torch.randn(90, 512, generator=generator)).bfloat16()
    indices = torch.randint(-5, 100, (4, 1, 70), generator=generator, dtype=torch.int32)
    indices[3] = -1
    lengths = torch.tensor([70, 33, 0, 5], dtype=torch.int32)
    seen = torch.zeros(100, dtype=torch.bool)
    for i in range(3):
        named = indices[i, 0, : int(lengths[i])].long()
        seen[named[named >= 0]] = True
    kv[~seen[:90]] = math.nan
    q = (8 * torch.randn(4, 1, 20, 512, generator=generator)).bfloat16()
    sinks = torch.randn(20, generator=generator)
    rows = NamedRows(kv, indices, lengths)
    got = sparse_mla(q, rows, selection, scale=sparse.SCALE, sinks=sinks)
    want = sparse_reference.sparse_mla(q, [(kv, indices, lengths)], sparse.SCALE, sinks=sinks)
    return _sparse_answer(got, want)


def merge_cases() -> Cases:
    return {
        "merge_states": lambda target: _merge_states(),
        "cascade": lambda target: _cascade(128, {"causal": True}),
        "cascade: window, soft cap, heads of 48": lambda target: _cascade(
            48, {"window_left": 6, "logits_soft_cap": 3.0}
        ),
    }


def _merge_states() -> Answer:
    """Three parts of the keys, and a state without keys that holds NaN."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 48, generator=generator) for n in (6, 90, 90))
    parts = (slice(0, 30), slice(30, 31), slice(31, 90))
    states = [reference.attention(q, k[part], v[part], 0.3) for part in parts]
    values = torch.stack([out.float() for out, _ in states], 1)[:, :, None]
    lses = torch.stack([lse / math.log(2) for _, lse in states], 1)[:, :, None].float()
    values = torch.cat([values, torch.full_like(values[:, :1], math.nan)], 1)
    lses = torch.cat([lses, torch.full_like(lses[:, :1], -math.inf)], 1)
    out = merge_states(values, lses)
    want, _ = reference.attention(q, k, v, 0.3)
    nothing = merge_states(values[:, 3:].contiguous(), lses[:, 3:].contiguous())
    if nothing.any():
        raise RuntimeError("no state with keys must give 0")
    return error_of(out[:, 0], want), 1e-5


def _cascade(dim: int, options: dict[str, Any]) -> Answer:
    """Three requests with a shared prefix: two levels of pages, merged. A window is for one level
    alone, which then has all pages."""
    generator = torch.Generator().manual_seed(2)
    heads, kv_heads, size, scale = 6, 2, 4, 0.2
    cache = torch.randn(16, 2, size, kv_heads, dim, generator=generator)
    cache[15] = math.nan  # no request's
    cache = cache.bfloat16()
    shared, own, last = [3, 9, 1], [[4, 5], [6], [7, 8, 10]], [1, 4, 3]
    counts, offsets = [1, 3, 2], [0, 1, 4, 6]
    q = torch.randn(6, heads, dim, generator=generator).bfloat16()
    flat = [shared + pages for pages in own]
    one_level = [page for pages in flat for page in pages]
    second_level = [page for pages in own for page in pages]
    if "window_left" in options:
        indptr = [0, *torch.tensor([len(pages) for pages in flat]).cumsum(0).tolist()]
        lists = [[offsets], [indptr], [one_level], [last]]
    else:
        lists = [[[0, 6], offsets], [[0, 3], [0, 2, 3, 6]], [shared, second_level], [[size], last]]
    arrays = [[torch.tensor(x, dtype=torch.int32) for x in levels] for levels in lists]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(lists[0]), torch.empty(1))
    wrapper.plan(
        *arrays, heads, kv_heads, dim, size,
        q_data_type=torch.bfloat16, sm_scale=scale, **options,
    )  # fmt: skip
    got = wrapper.run(q, cache)
    cap, window = options.get("logits_soft_cap"), options.get("window_left", -1)
    want = torch.empty(6, heads, dim, dtype=torch.float64)
    for i, pages in enumerate(flat):
        length = (len(pages) - 1) * size + last[i]
        keys, values = (cache[pages, n].flatten(0, 1)[:length] for n in range(2))
        query = length - counts[i] + torch.arange(counts[i])[:, None]
        position = torch.arange(length)[None]
        seen = position <= query if options.get("causal") else position >= 0
        if window >= 0:
            seen = seen & (position >= query - window)
        for head in range(heads):
            at = slice(offsets[i], offsets[i + 1])
            want[at, head], _ = reference.attention(
                q[at, head], keys[:, head // 3], values[:, head // 3], scale,
                seen=seen.expand(counts[i], length),
                logits=None if cap is None else lambda s: cap * torch.tanh(s / cap),
            )  # fmt: skip
    return error_of(got, want), ALLOWED
