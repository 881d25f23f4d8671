"""Compile every kernel that a shipped table chooses, for each architecture, without a GPU.

Run as a script it rewrites ``compile_report.json``; with the name of an architecture it prints that
part as JSON, which is what the test compares. Triton's interpreter must be off.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource

from backend_core.tables.select import KernelPath, PathSelection
from backend_core.target import Target
from dsv4_backend.compressor.bound import Variant
from dsv4_backend.compressor.variants import (
    decode_variant,
    in_place_variant,
    prefill_variants,
    queries_variant,
    splits_of,
)
from dsv4_backend.selection import decode_selection, prefill_selection, select_paths
from dsv4_backend.step_plan import StateLayout
from dsv4_backend.testing.check_cases import AMD_LAYOUTS
from dsv4_backend.testing.engine import make_spec
from tests.offline import TARGETS, dump, measure

REPORT = Path(__file__).with_name("compile_report.json")

Case = tuple[str, PathSelection, Callable[[KernelPath], Variant], dict[str, str]]
"""(name, the paths that a table has for it, the variant of a path, types of pointers that are not
the usual ones, "None" for an argument that the case has not)."""

_POINTERS = {
    "cache_ptr": "*u8",
    "second_ptr": "*u8",
    "arrived_ptr": "*i32",
    "entry_ptr": "*i32",
    "write_ptr": "*i32",
    "position_ptr": "*i64",
    "request_ptr": "*i32",
    "block_table_ptr": "*i32",
    "slot_ptr": "*i64",
    "state_slot_ptr": "*i64",
    "window_end_ptr": "*i32",
    "query_start_ptr": "*i32",
    "seq_len_ptr": "*i32",
}
_RING = ("entry_ptr", "write_ptr")
_PAGED = (
    *("position_ptr", "state_slot_ptr", "request_ptr", "block_table_ptr", "stride_block_table_b"),
    *("window_end_ptr", "query_start_ptr"),
)
_STEPS: tuple[tuple[str, int, StateLayout, str], ...] = (
    ("indexer_fp8", 4, "ring", "sglang"),
    ("indexer_fp8", 4, "paged", "vllm"),
    ("indexer_mxfp4", 4, "paged", "vllm"),
    ("fp8_ds_mla", 4, "ring", "sglang"),
    ("fp8_ds_mla", 4, "paged", "vllm"),
    ("bf16_rows", 4, "paged", "vllm"),
    ("fp8_ds_mla", 128, "ring", "sglang"),
    ("fp8_ds_mla", 128, "paged", "vllm"),
)
_AMD_STEPS = tuple(
    (spec.cache_format, spec.compress_ratio, layout, spec.rounding)
    for _, layout, spec in AMD_LAYOUTS
)
_STEMS = {  # of the cases' names, by kernel
    "prefill_paged_kernel": "prefill",
    "prefill_step_kernel": "prefill",
    "state_write_kernel": "write",
    "pool_columns_kernel": "pool",
    "finish_and_write_kernel": "finish",
}


def cases(target: Target) -> Iterator[Case]:
    """What is compiled: the formats and step plans of both engines."""
    for head_dim, dtype in ((128, "fp32"), (128, "bf16"), (512, "fp32")):
        selection = select_paths(target, f"in_place_{head_dim}")
        build = functools.partial(
            in_place_variant, head_dim=head_dim, compress_ratio=4, rotate=head_dim == 128
        )
        types = {"kv_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}"}
        yield f"in_place {head_dim} {dtype}", selection, build, types
    for step in _STEPS + _AMD_STEPS * (target.vendor == "amd"):
        yield from _step_cases(target, *step)
    for cache_format in ("indexer_fp8", "indexer_mxfp4"):
        spec = make_spec(cache_format, rope_layout="split")
        types = {"q_ptr": "*bf16", "code_ptr": "*u8", "scale_ptr": "*u8"}
        if cache_format == "indexer_fp8":
            types["scale_ptr"] = "None"
        build = functools.partial(queries_variant, spec=spec)
        yield f"queries {cache_format}", select_paths(target, "queries"), build, types


def _step_cases(
    target: Target, cache_format: str, ratio: int, layout: StateLayout, rounding: str
) -> Iterator[Case]:
    page_tokens = 1 if cache_format == "fp8_two_pools" else 64
    spec = make_spec(cache_format, ratio, rounding=rounding, page_tokens=page_tokens)
    block = 8 if (ratio, layout) == (128, "paged") else ratio
    name = f"{cache_format} c{ratio} {layout}"
    missing = _RING if layout == "paged" else _PAGED
    if not spec.second_page_bytes:
        missing += ("second_ptr", "stride_second_p")
    types = dict.fromkeys(missing, "None")

    def decode(path: KernelPath) -> Variant:
        return decode_variant(path, spec, layout, block, pdl_prefetch_safe=True)

    selection = decode_selection(target, spec)
    yield f"decode {name}", selection, decode, types
    if ratio == 128:  # the other of its two kernels, whatever the table chooses for one request
        path = selection.lookup(1)
        if splits_of(path) == 1:
            warps = 1 if target.vendor == "amd" else 4
            params = {"splits": 8, "num_warps": warps, "block_w": 32, "max_registers": 0}
            other, form = dataclasses.replace(path.params, **params), "split"
        else:
            whole = next(one for one in selection.paths if splits_of(one) == 1)
            other, form = whole.params, "whole"
        chosen = dataclasses.replace(path, params=other)
        yield f"decode {form} {name}", PathSelection.of(chosen), decode, types
    is_amd = (cache_format, ratio, layout, rounding) in _AMD_STEPS
    if cache_format not in ("indexer_fp8", "fp8_ds_mla") and not is_amd:
        return  # they differ in the store alone
    selection = prefill_selection(target, spec, layout)
    launches = prefill_variants(selection.lookup(1), spec, layout, block)
    for number, launch in enumerate(launches):
        if is_amd and "FORMAT" not in launch.constexprs:
            continue  # the same kernel as for other formats

        def prefill(path: KernelPath, number: int = number) -> Variant:
            return prefill_variants(path, spec, layout, block)[number]

        yield f"{_STEMS[launch.kernel.__name__]} {name}", selection, prefill, types


def compile_case(arch: str, case: Case, is_large: bool, grid: int = 1) -> tuple[int, Any] | None:
    """Build one case as the shipped table has it: (warps, compiled kernel).

    ``None`` for a grid that has the parameters of the smallest.

    Args:
        is_large: on HIP, pointers whose tensors may exceed 2 GiB and so get no buffer instructions.
    """
    _, selection, build, types = case
    gpu, _ = TARGETS[arch]
    path = selection.lookup(grid)
    if grid > 1 and path.params == selection.lookup(1).params:
        return None
    variant = build(path)
    kernel, constexprs = variant.kernel, dict(variant.constexprs)
    signature, attrs = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if types.get(argument) == "None":
            constexprs[argument] = None
        if argument in constexprs:
            signature[argument] = "constexpr"
            continue
        aligned = [["tt.divisibility", 16]]
        if argument.endswith("_ptr"):
            signature[argument] = types.get(argument) or _POINTERS.get(argument, "*fp32")
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
    compiled = triton.compile(source, target=gpu, options=variant.options)
    return variant.options["num_warps"], compiled


def compiled(arch: str) -> Iterator[tuple[str, int, Any]]:
    """Every case of one architecture, on HIP once more for large tensors, and once more where the
    table has other parameters for large grids."""
    for case in cases(TARGETS[arch][1]):
        variants = [("", False, 1), (", large grid", False, 1 << 20)]
        if arch.startswith("gfx"):
            variants.append((", over 2 GiB", True, 1))
        for suffix, is_large, grid in variants:
            built = compile_case(arch, case, is_large, grid)
            if built is not None:
                yield case[0] + suffix, *built


def report(arch: str) -> dict[str, dict[str, int]]:
    """The table of one architecture, a line for each case."""
    return {name: {"num_warps": warps, **measure(kernel)} for name, warps, kernel in compiled(arch)}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(report(sys.argv[1])))
    else:
        REPORT.write_text(dump({arch: report(arch) for arch in TARGETS}), encoding="utf-8")
