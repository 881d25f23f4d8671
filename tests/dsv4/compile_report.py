"""Compile every kernel that a shipped table chooses, for all four architectures, without a GPU.

Run as a script it rewrites ``compile_report.json``; with the name of an architecture it prints that
part as JSON, which is what the test compares, and with beginnings of cases' names after it
those cases' assembly. Triton's interpreter must be off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backend_core.tables.select import load_table, select
from backend_core.target import KNOWN_TARGETS, Target
from dsv4_backend import selection as paths
from dsv4_backend.kernels.decode_pair import decode_pair_kernel
from dsv4_backend.kernels.decode_step import decode_step_kernel
from dsv4_backend.kernels.finish_and_write import finish_and_write_kernel
from dsv4_backend.kernels.indexer_queries import indexer_queries_kernel
from dsv4_backend.kernels.norm_rope_rotate import norm_rope_rotate_kernel
from dsv4_backend.kernels.pool_columns import pool_columns_kernel
from dsv4_backend.kernels.prefill_paged import prefill_paged_kernel
from dsv4_backend.kernels.prefill_step import prefill_step_kernel
from dsv4_backend.kernels.state_write import state_write_kernel
from tests.dsv4.cases import make_spec
from tests.offline import dump, measure

REPORT = Path(__file__).with_name("compile_report.json")
TARGETS: dict[str, tuple[GPUTarget, Target]] = {
    "sm90": (GPUTarget("cuda", 90, 32), KNOWN_TARGETS["H200"]),
    "sm100": (GPUTarget("cuda", 100, 32), KNOWN_TARGETS["B200"]),
    "gfx942": (GPUTarget("hip", "gfx942", 64), KNOWN_TARGETS["MI300X"]),
    "gfx950": (GPUTarget("hip", "gfx950", 64), KNOWN_TARGETS["MI355X"]),
}
# Shared memory that one program may use, in bytes.
SHARED_LIMIT = {"sm90": 232448, "sm100": 232448, "gfx942": 65536, "gfx950": 163840}

Case = tuple[str, Any, dict[str, Any], str, str, dict[str, str]]
"""(name, kernel, constexprs, phase, table feature, pointer types that are not the usual ones)."""

_POINTERS = {
    "cache_ptr": "*u8",
    "plan_ptr": "*i32",
    "aux_ptr": "*i64",
    "write_ptr": "*i32",
    "write_aux_ptr": "*i64",
    "position_ptr": "*i64",
    "request_ptr": "*i32",
    "block_table_ptr": "*i32",
    "slot_ptr": "*i64",
    "state_slot_ptr": "*i64",
}
_PAGED = {"plan_ptr": "*i64"}
_STATE_BLOCK = {"ring": {4: 4, 128: 128}, "paged": {4: 4, 128: 8}}


def cases() -> Iterator[Case]:
    """What is compiled: the formats and plans of both engines."""
    for head_dim, dtype, is_decode in (
        (128, "fp32", True),
        (128, "fp32", False),
        (128, "bf16", False),
        (512, "fp32", False),
    ):
        constexprs = {"D": head_dim, "RATIO": 4, "IS_DECODE": is_decode}
        constexprs["HAS_ROTATION"] = head_dim == 128
        phase = "decode" if is_decode else "prefill"
        types = {"kv_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}"}
        name = f"in_place {head_dim} {dtype} {phase}"
        yield name, norm_rope_rotate_kernel, constexprs, phase, f"in_place_{head_dim}", types
    for cache_format, ratio, layout, rounding in (
        ("indexer_fp8", 4, "ring", "sglang"),
        ("indexer_fp8", 4, "paged", "vllm"),
        ("indexer_mxfp4", 4, "paged", "vllm"),
        ("fp8_ds_mla", 4, "ring", "sglang"),
        ("fp8_ds_mla", 4, "paged", "vllm"),
        ("bf16_rows", 4, "paged", "vllm"),
        ("fp8_ds_mla", 128, "ring", "sglang"),
        ("fp8_ds_mla", 128, "paged", "vllm"),
    ):
        spec = make_spec(cache_format, ratio, rounding=rounding, page_tokens=64)
        common = paths.step_constexprs(spec, layout, _STATE_BLOCK[layout][ratio])
        feature = paths.feature_of(spec)
        name = f"{cache_format} c{ratio} {layout}"
        types = _PAGED if layout == "paged" else {}
        yield f"decode {name}", decode_step_kernel, common, "decode", feature, types
        rows = {key: common[key] for key in ("D", "RATIO", "STATE_BLOCK", "PLAN")}
        types = {"aux_ptr": "*i32", "write_ptr": "*i64"} if layout == "paged" else {}
        if ratio == 128:
            yield f"pool {name}", pool_columns_kernel, rows, "prefill", feature, types
            yield f"finish {name}", finish_and_write_kernel, common, "prefill", feature, types
            continue
        if cache_format in ("indexer_fp8", "fp8_ds_mla"):  # the others differ in the store alone
            if layout == "paged":
                paged = paths.paged_constexprs(common)
                yield f"prefill {name}", prefill_paged_kernel, paged, "prefill", feature, types
                continue
            yield f"prefill {name}", prefill_step_kernel, common, "prefill", feature, types
            yield f"write {name}", state_write_kernel, rows, "prefill", feature, types
    for cache_format in ("indexer_fp8", "indexer_mxfp4"):
        spec = make_spec(cache_format, rope_layout="split")
        types = {"q_ptr": "*bf16", "code_ptr": "*u8", "scale_ptr": "*u8"}
        name = f"queries {cache_format}"
        constexprs = paths.query_constexprs(spec)
        yield name, indexer_queries_kernel, constexprs, "decode", "queries", types
    for layout, rounding in (("ring", "sglang"), ("paged", "vllm")):
        main = make_spec("fp8_ds_mla", rounding=rounding, page_tokens=64)
        indexer = make_spec("indexer_fp8", rounding=rounding, page_tokens=64)
        constexprs = paths.pair_constexprs(main, indexer, layout, (4, 4))
        types = {"m_plan_ptr": "*i64", "x_plan_ptr": "*i64"} if layout == "paged" else {}
        yield f"decode pair {layout}", decode_pair_kernel, constexprs, "decode", "pair", types


def compile_case(arch: str, case: Case, is_large: bool, grid: int = 1) -> tuple[int, Any] | None:
    """Build one case as the shipped table has it: (warps, compiled kernel).

    ``None`` for a grid that has the parameters of the smallest.

    Args:
        is_large: on HIP, pointers whose tensors may exceed 2 GiB and so get no buffer instructions.
    """
    _, kernel, constexprs, phase, feature, types = case
    gpu, target = TARGETS[arch]
    requires = {feature}
    if phase == "prefill" and kernel is not norm_rope_rotate_kernel:
        requires.add(constexprs.get("PLAN", "paged"))
    selection = select(load_table("dsv4", target), phase, frozenset(requires))
    path = selection.lookup(grid)
    params = path.params
    if grid > 1 and params == selection.lookup(1).params:
        return None
    constexprs = dict(constexprs)
    for argument in ("BLOCK_W", "BLOCK_D", "ROWS", "HEADS"):
        if argument in kernel.arg_names:
            constexprs[argument] = params[argument.lower()]
    if "READS_EARLY" in kernel.arg_names:
        constexprs |= paths.decode_constexprs(path, kernel, True)
    elif "PDL" in kernel.arg_names:
        constexprs |= paths.pdl(path, kernel)
    is_rest = kernel in (state_write_kernel, finish_and_write_kernel)
    options = paths.options(path, "rest_num_warps" if is_rest else "num_warps")
    signature, attrs = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constexprs:
            signature[argument] = "constexpr"
            continue
        plain = argument.removeprefix("m_").removeprefix("x_")
        aligned = [["tt.divisibility", 16]]
        if argument.endswith("_ptr"):
            signature[argument] = types.get(argument) or _POINTERS.get(plain, "*fp32")
            if gpu.backend == "hip" and not is_large:
                aligned.append(["tt.pointer_range", 32])
        elif argument.startswith("stride_") or argument.startswith("num_"):
            signature[argument] = "i32"
            if "block_table" in argument or argument.startswith("num_"):
                continue
        else:
            signature[argument] = "fp32"
            continue
        attrs[(index,)] = aligned
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attrs)
    return options["num_warps"], triton.compile(source, target=gpu, options=options)


def build_launches(target: Target) -> None:
    """Build what the operators would launch: this checks every constexpr's name and place."""
    main, indexer = make_spec("fp8_ds_mla"), make_spec("indexer_fp8")
    for phase in ("decode", "prefill"):
        for head_dim in (128, 512):
            paths.in_place_paths(target, phase, head_dim, 4, True)
    for spec in (main, indexer, make_spec("fp8_ds_mla", 128)):
        paths.decode_paths(target, spec, "ring", spec.compress_ratio)
        for layout in ("ring", "paged"):
            paths.prefill_paths(target, spec, layout, spec.compress_ratio)
    paths.pair_paths(target, main, indexer, "ring", (4, 4))


def compiled(arch: str) -> Iterator[tuple[str, int, Any]]:
    """Every case of one architecture, on HIP once more for large tensors, and once more where the
    table has other parameters for large grids."""
    for case in cases():
        variants = [("", False, 1), (", large grid", False, 1 << 20)]
        if arch.startswith("gfx"):
            variants.append((", over 2 GiB", True, 1))
        for suffix, is_large, grid in variants:
            built = compile_case(arch, case, is_large, grid)
            if built is not None:
                yield case[0] + suffix, *built


def report(arch: str) -> dict[str, dict[str, int]]:
    """The table of one architecture, a line for each case."""
    build_launches(TARGETS[arch][1])
    return {name: {"num_warps": warps, **measure(kernel)} for name, warps, kernel in compiled(arch)}


def assembly(arch: str, prefixes: list[str]) -> dict[str, str]:
    """The amdgcn text of the cases whose names start with one of ``prefixes``."""
    texts = {}
    for case in cases():
        if case[0].startswith(tuple(prefixes)):
            for is_large, suffix in ((False, ""), (True, ", over 2 GiB")):
                built = compile_case(arch, case, is_large)
                assert built is not None  # the smallest grid has parameters
                texts[case[0] + suffix] = built[1].asm["amdgcn"]
    return texts


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(assembly(sys.argv[1], sys.argv[2:])))
    elif len(sys.argv) > 1:
        print(json.dumps(report(sys.argv[1])))
    else:
        REPORT.write_text(dump({arch: report(arch) for arch in TARGETS}), encoding="utf-8")
