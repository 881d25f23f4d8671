"""Compile the kernels of block-sparse attention for each architecture, without a GPU.

Run as a script it rewrites ``compile_report.json``; with the name of an architecture it prints that
part as JSON, which is what the test compares. Triton's interpreter must be off.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from backend_core.launch.triton import OPTIONS
from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from block_sparse_backend import masks
from block_sparse_backend.dense8.triton import max_registers
from block_sparse_backend.kernels import block_sparse, block_sparse_int8, plans, predict, quantise
from block_sparse_backend.kernels.sm90 import block_sparse as block_sparse_sm90
from block_sparse_backend.launch_params import TABLES
from block_sparse_backend.predict.triton import (
    ORDER_ROWS,
    SCORE_COLS,
    SCORE_ROWS,
    SCORE_STEP,
    SCORE_WARPS,
)
from block_sparse_backend.spec import QuantisedSpec, SageMode
from tests.offline import TARGETS, Report, compile_kernel, dump, measure

REPORT = Path(__file__).with_name("compile_report.json")
CONFIGS = Path(__file__).parents[2] / "configs"
Case = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]
"""(name, kernel, types that are not the usual ones, constexprs, options)."""

_INTS = (
    "rows_ptr",
    "cols_ptr",
    "work_ptr",
    "sequences_ptr",
    "first_blocks_ptr",
    "spans_ptr",
    "mask_aux_ptr",
    "cu_q_ptr",
    "cu_k_ptr",
    "key_blocks_ptr",
)
_FLOATS = ("factor", "softmax_scale", "scale_log2", "min_likeness")


def cases(arch: str) -> Iterator[Case]:
    """What is compiled for one architecture."""
    nvidia = arch.startswith("sm")
    tile, _ = _tile(arch, "block_sparse")
    yield _attention("block_sparse causal", tile, masks.causal)
    if arch == "sm90" or not nvidia:
        wide = (128, 64, 8, 2) if nvidia else (64, 64, 4, 2)
        yield _attention("block_sparse 192-128", wide, masks.causal, dims=(192, 128))
    if "e4m3_values" in _tile(arch, "block_sparse_int8")[1]:
        yield _int8(arch, "int8 e4m3", masks.causal, True)
    if arch == "sm90":
        yield _int8(arch, "int8 e4m3, every key", masks.everything, True)
        yield _int8(arch, "int8 e4m3, every key, D 64", masks.everything, True, d=64)
    yield _int8(arch, "int8 16-bit values", masks.causal, False)
    if arch == "sm90":
        name = "int8 16-bit values, packed sequences"
        yield _int8(arch, name, masks.causal, False, is_packed=True)
    if arch in ("sm90", "sm100") or not nvidia:
        yield from _small_kernels(arch, 128 if nvidia else 64, nvidia)
    if arch == "sm90":
        for name, kernel, types, constexprs, options in list(_small_kernels(arch, 128, True)):
            given = constexprs.keys() & {"spans_ptr", "first_blocks_ptr", "sequences_ptr"}
            if given and "pool" not in name:
                own = {key: value for key, value in constexprs.items() if key not in given}
                own |= {"HAS_RANGE": False} if "HAS_RANGE" in own else {}
                yield f"{name}, packed sequences", kernel, types, own, options


def _tile(arch: str, operator: str) -> tuple[tuple[int, int, int, int], frozenset[str]]:
    """Queries, keys, warps and stages of the table's first Triton row, and what it can do."""
    row = _row(arch, operator)
    params = row.params
    tile = (params.block_m, params.block_n, params.num_warps, params.num_stages)
    return tile, row.features


def _row(arch: str, operator: str) -> Row:
    rows = load_table(TABLES, TARGETS[arch][1], directory=CONFIGS).rows
    return next(row for row in rows if (row.operator, row.name) == (operator, "triton"))


def _attention(
    name: str,
    tile: tuple[int, int, int, int],
    mask: masks.Mask,
    *,
    dims: tuple[int, int] = (128, 128),
) -> Case:
    block_m, block_n, warps, stages = tile
    block_d = triton.next_power_of_2(dims[0])
    constexprs = {
        "GROUP": 4,
        "DV": dims[1],
        "BLOCK_D": block_d,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "STAGES": stages,
        "HAS_PARTIAL": True,
        "mask": mask.kernel,
    }
    types = {
        "q_desc": f"tensordesc<bf16[1,1,{block_m},{block_d}]>",
        "k_desc": f"tensordesc<bf16[1,1,{block_n},{block_d}]>",
        "v_desc": f"tensordesc<bf16[1,1,{block_n},{dims[1]}]>",
        "out_ptr": "*bf16",
    }
    options = {"num_warps": warps, "num_stages": stages}
    return name, block_sparse.block_sparse_kernel, types, constexprs, options


def _int8(
    arch: str,
    name: str,
    mask: masks.Mask,
    is_fp8: bool,
    is_packed: bool = False,
    d: int = 128,
) -> Case:
    kernels = block_sparse_int8
    (block_m, block_n, warps, stages), _ = _tile(arch, "block_sparse_int8")
    block_n = block_n if is_fp8 else min(block_n, 64)
    constexprs = {
        "HEADS": 24,
        "GROUP": 1,
        "D": d,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "SPAN": 64 if is_fp8 else 32,
        "STAGES": stages,
        "P_LOG2": math.log2(448.0) if is_fp8 else 0.0,
        "values": kernels.e4m3_values if is_fp8 else kernels.half_values,
        "mask": mask.kernel,
        **({} if is_fp8 else {"v_scale_ptr": None, "v_offset_ptr": None, "order_ptr": None}),
        **(
            {"lse_ptr": None, "shift_ptr": None}
            if is_packed
            else {"sequences_ptr": None, "first_blocks_ptr": None}
        ),
    }
    values = f"fp8e4nv[1,1,{d},{block_n}]" if is_fp8 else f"bf16[1,1,{block_n},{d}]"
    types = {
        "q_desc": f"tensordesc<i8[1,1,{block_m},{d}]>",
        "k_desc": f"tensordesc<i8[1,1,{block_n},{d}]>",
        "v_desc": f"tensordesc<{values}>",
        "out_ptr": "*bf16",
    }
    if is_fp8:
        types["order_ptr"] = "*i8"
    options = {"num_warps": warps, "num_stages": stages}
    spec = QuantisedSpec(SageMode(fp8_values=is_fp8), dim=d, mask=mask)
    if limit := max_registers(_row(arch, "block_sparse_int8").params, spec):
        options["maxnreg"] = limit
    return name, kernels.block_sparse_int8_kernel, types, constexprs, options


def _small_kernels(arch: str, block_n: int, is_fp8: bool) -> Iterator[Case]:
    """Quantisers and prediction for blocks of so many keys, and for values in e4m3 or 16 bits."""
    heads = {"HEADS": 24, "D": 128}
    half = {"x_ptr": "*bf16", "k_ptr": "*bf16", "q_ptr": "*bf16", "v_ptr": "*bf16"}
    stats = quantise.column_stats_kernel
    sizes = {"CHUNK": 512, "BLOCK": 32, "HAS_RANGE": is_fp8}
    four, alone = {"num_warps": 4}, {"spans_ptr": None}
    absent = {"first_blocks_ptr": None, "sequences_ptr": None}
    yield "column_stats", stats, half, heads | sizes | alone, four
    yield "mean", quantise.mean_kernel, {}, heads | absent | {"STEP": 32}, four
    int8 = half | {"out_ptr": "*i8", "order_ptr": "*i8"}
    for pool, likeness in ((False, False), (True, False), (True, True)):
        pooled = {"HAS_POOL": pool, "HAS_LIKENESS": likeness}
        suffix = (" and pool" if pool else "") + (" with likeness" if likeness else "")
        keys = heads | pooled | alone | {"BLOCK": block_n, "SPAN": 64 if is_fp8 else 32}
        keys |= {} if is_fp8 else {"order_ptr": None}
        kernel = quantise.quantise_keys_kernel
        yield f"quantise_keys{suffix}", kernel, int8, keys, {"num_warps": 8}
        queries = heads | pooled | {"BLOCK": 64, "GROUP": 1}
        kernel = quantise.quantise_queries_kernel
        yield f"quantise_queries{suffix}", kernel, int8, queries, {"num_warps": 1}
    if is_fp8:
        sizes = {"STEP": 32, "D": 128}
        kernel = quantise.value_scales_kernel
        yield "value_scales", kernel, {}, sizes | {"E4M3_MAX": 448.0}, four
        yield "value_offset", quantise.value_offset_kernel, {}, sizes, four
        types = half | {"out_ptr": "*fp8e4nv", "order_ptr": "*i8"}
        sizes = {"BLOCK": block_n}
        yield (
            "quantise_values",
            quantise.quantise_values_kernel,
            types,
            heads | sizes,
            {"num_warps": 16},
        )
    for likeness in (False, True):
        flags = {"HAS_MEAN": likeness, "HAS_LIKENESS": likeness}
        name = "pool with likeness" if likeness else "pool"
        sizes = {"BLOCK": block_n, "STEP": 16}
        yield name, predict.pool_kernel, half, heads | sizes | flags, {"num_warps": 1}
    blocks = {"HEADS": 24, "GROUP": 1, "BLOCK_M": 64, "BLOCK_N": block_n, "IS_CAUSAL": True}
    for centred in (False, True):
        sizes = {"ROWS": SCORE_ROWS, "COLS": SCORE_COLS, "STEP": SCORE_STEP, "D": 128}
        flags = {"IS_CENTRED": centred}
        name = "score of centred keys" if centred else "score"
        warps = {"num_warps": SCORE_WARPS}
        yield name, predict.score_kernel, {}, blocks | sizes | flags, warps
    for name, is_cdf in (
        ("cdf", True),
        ("topk", False),
        ("cdf of each head", True),
    ):
        flags = {"WIDTH": 1024, "IS_CDF": is_cdf, "HAS_SINK": False, "HAS_LIKENESS": is_cdf}
        flags |= {"PER_HEAD": name.endswith("head")}
        select = predict.select_blocks_kernel
        yield f"select_blocks {name}", select, {"amount": "fp32"}, blocks | flags, {"num_warps": 1}
    sizes = {"HEADS": 24, "BLOCK": ORDER_ROWS}
    yield "order_rows", predict.order_rows_kernel, {}, sizes, four
    sizes = {"BLOCK_N": block_n, "WIDTH": 1024, "HAS_SINK": False}
    yield "map_rows", plans.map_rows_kernel, {"map_ptr": "*u8"}, sizes, {"num_warps": 1}
    flags = {"HEADS": 24, "BLOCK_M": 64, "BLOCK_N": block_n, "IS_CAUSAL": True, "STEP": 64}
    yield "packed_plan", plans.packed_plan_kernel, {}, flags, four


def compile_case(arch: str, case: Case) -> dict[str, int]:
    """Build one Triton case and measure it."""
    _, kernel, given, constexprs, options = case
    types = {name: _type(name, given) for name in kernel.arg_names if name not in constexprs}
    pointers = [n for n, kind in types.items() if kind.startswith("*")]
    aligned = [
        n for n in types if n in pointers or n.startswith("stride_") or n in ("padded", "pitch")
    ]
    return compile_kernel(arch, kernel, types, constexprs, options, frozenset(aligned))


def _type(name: str, given: dict[str, str]) -> str:
    if name in given:
        return given[name]
    if name in _INTS:
        return "*i32"
    if name.endswith("_ptr"):
        return "*fp32"
    return "fp32" if name in _FLOATS else "i32"


def build_gluon(
    block_n: int,
    stages: int,
    mask: masks.Mask,
    is_packed: bool = False,
    d: int = 128,
) -> Any:
    """The Hopper kernel, as Triton compiles it."""
    kernel = block_sparse_sm90.block_sparse_sm90_kernel

    def descriptor(rows: int) -> str:
        block = [1, 1, rows, d]
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        return f"tensordesc<bf16{block},{layout!r}>"

    constexprs = {
        "GROUP": 4,
        "BLOCK_N": block_n,
        "D": d,
        "STAGES": stages,
        "REGISTERS": 240,
        "mask": mask.kernel,
        "IS_PACKED": is_packed,
    }
    given = {"q_desc": descriptor(64), "k_desc": descriptor(block_n), "v_desc": descriptor(block_n)}
    given["out_ptr"] = "*bf16"
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constexprs else _type(name, given)
        if name.endswith("_ptr") or name.startswith("stride_"):
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constexprs=constexprs, attrs=attrs)
    target, _ = TARGETS["sm90"]
    return triton.compile(source, target=target, options={**OPTIONS, "num_warps": 4})


def report(arch: str) -> Report:
    """A line for each case."""
    lines = {case[0]: compile_case(arch, case) for case in cases(arch)}
    if arch == "sm90":
        for mask in (masks.causal, masks.block_end):
            lines[f"gluon {mask.name}"] = measure(build_gluon(128, 2, mask))
        for d, block_n, stages, name in ((128, 128, 2, ""), (64, 64, 4, ", D 64")):
            kernel = build_gluon(block_n, stages, masks.causal, True, d)
            lines[f"gluon packed causal{name}"] = measure(kernel)
    return lines


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(report(sys.argv[1])))
    else:
        REPORT.write_text(dump({arch: report(arch) for arch in TARGETS}), encoding="utf-8")
