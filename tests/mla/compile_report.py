"""Compile every Triton kernel of the family as the shipped tables choose it, without a GPU.

``python -m tests.mla.compile_report --write`` rewrites ``compile_report.json``; with the name
of an architecture, or ``gfx942:quick``, it prints that part as JSON, which the test compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental.gluon._runtime import GluonASTSource

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from backend_core.target import KNOWN_TARGETS
from mla_backend import combine
from mla_backend.decode import triton as mla_triton
from mla_backend.drop_ins.flashinfer import cascade, merge
from mla_backend.launch_params import TABLES
from mla_backend.plan import fill, planner
from mla_backend.sparse import combine as sparse_mla_combine
from mla_backend.sparse import gluon_sm90 as sparse_mla_sm90
from mla_backend.sparse import triton as sparse_mla_triton
from mla_backend.spec import MlaSpec
from mla_backend.spec_sparse_mla import SparseMlaSpec
from tests.offline import TARGETS, Report, compile_kernel, dump, measure

REPORT = Path(__file__).with_name("compile_report.json")
CONFIGS = Path(__file__).parents[2] / "configs"
_FP32 = {
    "sinks_ptr",
    "lse_ptr",
    "partial_out_ptr",
    "partial_lse_ptr",
    "s_ptr",
    "other_lse_ptr",
}
_INT64 = {"scales_ptr", "extra_scales_ptr"}
_BYTES = {"cache_ptr", "extra_cache_ptr"}
_INT32 = {
    "block_table_ptr",
    "lengths_ptr",
    "work_ptr",
    "num_splits_ptr",
    "tiles_ptr",
    "members_ptr",
    "prefix_tile_ptr",
    "prefix_row_ptr",
    "scratch_ptr",
    "leader_ptr",
    "shared_ptr",
    "tile_lengths_ptr",
    "qo_indptr_ptr",
    "kv_indptr_ptr",
    "kv_indices_ptr",
    "last_page_len_ptr",
    "tile_request_ptr",
    "tile_start_ptr",
    "indices_ptr",
    "extra_indices_ptr",
    "extra_lengths_ptr",
}
_FLOATS = {"scale"}
_ALIGNED_STRIDES = {"stride_q_t", "stride_q_h", "stride_page", "stride_extra_page", "stride_kv"}
_PREFIX = ("tiles_ptr", "members_ptr", "prefix_tile_ptr", "prefix_row_ptr")
_ABSENT = (*_PREFIX, "sinks_ptr")
LAYERS = ((16, 64), (64, 1))
"""(heads, page size)."""
Case = tuple[str, KernelLaunch, tuple[str, ...]]
"""(name, launch, pointers that are not there)."""


def _decode_kernel(row: Row, spec: MlaSpec) -> KernelLaunch:
    rows = mla_triton.block_rows_of(row.params, spec.query_rows)
    return mla_triton.decode_kernel(row.params, spec, True, rows)


def cases(arch: str) -> Iterator[Case]:
    """The decode kernel for each row of the table and page size; then what surrounds it."""
    rows = load_table(TABLES, TARGETS[arch][1], directory=CONFIGS).rows
    for path in rows:
        if (path.operator, path.name) != ("mla_decode", "triton"):
            continue
        for heads, page_size in LAYERS:
            kernel = _decode_kernel(path, MlaSpec(heads, page_size))
            yield f"mla_decode {heads} heads, page {page_size}", kernel, _ABSENT
        kernel = _decode_kernel(path, MlaSpec(16, 64, query_tokens=2))
        yield "mla_decode 16 heads, two levels, sinks", kernel, ()
    yield from sparse_cases(arch)
    yield "combine", combine._triton_kernel(512), (*_PREFIX, "sinks_ptr")
    yield "combine, two levels, sinks", combine._triton_kernel(512), ()
    yield "split_plan, 128 requests", fill._split_kernel(128, 256), ()
    leaders, tiles = planner._prefix_kernels(64, 64, 64)
    yield "find_leaders, 64 requests", leaders, ()
    yield "two_level_tiles, 64 requests", tiles, ()
    settings = cascade._Settings(32, 8, 128, 16, 0.1, -1, 0.0, torch.bfloat16, True)
    paged = cascade._kernel(settings, True, torch.bfloat16)
    yield "paged_attention 32/8 heads of 128, page 16", paged, ()
    yield "merge_states 128", merge._kernel(128), ()


def sparse_cases(arch: str) -> Iterator[Case]:
    """Sparse MLA's kernels for each row of the table: split over two caches, direct over one."""
    rows = load_table(TABLES, TARGETS[arch][1], directory=CONFIGS).rows
    for path in rows:
        if (path.operator, path.name) != ("sparse_mla", "triton"):
            continue
        for heads in (8, 64):
            kernel = sparse_mla_triton.records_kernel(
                path.params,
                SparseMlaSpec(heads, page_size=64, extra_page_size=2),
                tl.bfloat16,
                True,
            )
            yield f"sparse_mla {heads} heads, split, two caches", kernel, ("sinks_ptr",)
        kernel = sparse_mla_triton.records_kernel(
            path.params, SparseMlaSpec(16, page_size=61), tl.bfloat16, False
        )
        absent = tuple(n for n in kernel.argument_names if n.startswith(("extra_", "partial_")))
        absent = tuple(n for n in absent if n.endswith("_ptr"))
        yield "sparse_mla 16 heads, pages of 61, sinks", kernel, absent
        kernel = sparse_mla_triton.rows_kernel(
            path.params, SparseMlaSpec(16, "bf16_rows"), tl.bfloat16
        )
        yield "sparse_mla 16 heads, rows of bf16, sinks", kernel, ()
    for splits in (2, 16):
        dim = min(512, 4096 // splits)
        pdl = arch.startswith("sm") and int(arch[2:]) >= 90
        kernel = sparse_mla_combine.combine_kernel(splits, dim, pdl)
        yield f"sparse_mla_combine, {splits} splits, sinks", kernel, ()
    if arch == "sm90":
        kernel = sparse_mla_combine.combine_shares_kernel(16, 1, 128, True)
        yield "sparse_mla_combine_shares, 128 requests, sinks", kernel, ()


def gluon_cases() -> Iterator[Case]:
    """Sparse MLA's kernels for Hopper, for each row of its table."""
    rows = load_table(TABLES, KNOWN_TARGETS["H200"], directory=CONFIGS).rows
    for path in rows:
        if (path.operator, path.name) != ("sparse_mla", "gluon_sm90"):
            continue
        heads = path.params.max_heads
        spec = SparseMlaSpec(heads, page_size=64, extra_page_size=2)
        kernel = sparse_mla_sm90.records_kernel(path.params, spec, 128, False)
        yield f"sparse_mla_sm90 {heads} heads, 128 requests, two caches, sinks", kernel, ()
        kernel = sparse_mla_sm90.records_kernel(path.params, spec, 0, True)
        yield f"sparse_mla_sm90 {heads} heads, split, two caches", kernel, ("sinks_ptr",)
        kernel = sparse_mla_sm90.records_kernel(path.params, spec, 0, False)
        absent = ("partial_out_ptr", "partial_lse_ptr")
        yield f"sparse_mla_sm90 {heads} heads, two caches, sinks", kernel, absent
        kernel = sparse_mla_sm90.rows_kernel(path.params, SparseMlaSpec(heads, "bf16_rows"))
        yield f"sparse_mla_sm90 {heads} heads, rows of bf16, sinks", kernel, ()


def build_gluon(case: Case) -> Any:
    """One of Hopper's Gluon kernels, as Triton compiles it."""
    _, launch, absent = case
    kernel = launch._fn
    constexprs: dict[str, Any] = {n: v for n, v in launch._kwargs.items() if n in kernel.arg_names}
    options = {n: v for n, v in launch._kwargs.items() if n not in constexprs}
    constexprs |= dict.fromkeys(absent)
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
        elif name in _INT32 or name in _BYTES:  # records are read as words
            signature[name] = "*i32"
        elif name in _FP32:
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*bf16"
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
        if name not in constexprs and (name.endswith("_ptr") or name in _ALIGNED_STRIDES):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=TARGETS["sm90"][0], options=options)


def compile_case(arch: str, case: Case) -> dict[str, int]:
    _, launch, absent = case
    kernel = launch._fn
    constexprs: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in launch._kwargs.items():
        (constexprs if name in kernel.arg_names else options)[name] = value
    types = {}
    for name in kernel.arg_names:
        if name in constexprs:
            continue
        if name in absent:
            constexprs[name] = None
        elif name in _INT32:
            types[name] = "*i32"
        elif name in _FP32:
            types[name] = "*fp32"
        elif name in _INT64 or name in _BYTES:
            types[name] = "*i64" if name in _INT64 else "*u8"
        elif name.endswith("_ptr"):
            types[name] = "*bf16"
        else:
            types[name] = "fp32" if name in _FLOATS else "i32"
    aligned = frozenset(name for name in types if name.endswith("_ptr"))
    if "rows" in kernel.arg_names:  # sparse MLA's contract: pages and rows start at 16 bytes
        aligned |= {name for name in types if name in _ALIGNED_STRIDES}
    return compile_kernel(arch, kernel, types, constexprs, options, aligned)


QUICK = ("mla_decode 16 heads, page 64", "combine", "merge_states 128")


def report(arch: str, quick: bool = False) -> Report:
    chosen = (case for case in cases(arch) if not quick or case[0] in QUICK)
    lines = {case[0]: compile_case(arch, case) for case in chosen}
    if arch == "sm90" and not quick:
        lines |= {case[0]: measure(build_gluon(case)) for case in gluon_cases()}
    return lines


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        REPORT.write_text(dump({arch: report(arch) for arch in TARGETS}))
    else:
        arch, _, quick = sys.argv[1].partition(":")
        print(json.dumps(report(arch, quick == "quick")))
