"""Compile every KDA kernel as the shipped tables choose it, for each architecture, without a GPU.

``python -m tests.kda.compile_report --write`` rewrites ``compile_report.json``; with the name of an
architecture it prints that part as JSON, which is what the test compares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.load import Row, load_table
from kda_backend.decode_step.fused import step_kernel
from kda_backend.launch_params import TABLES
from kda_backend.layer_checkpoints import _kernel as _store_checkpoints_kernel
from kda_backend.layer_stages import _gated_norm_kernel, _short_conv_kernel
from kda_backend.prefill.two_stage import _two_stage_kernels, _TwoStageKernels
from kda_backend.recurrent.recurrent import _recurrent_kernel
from kda_backend.spec import Beta, Gate
from kda_backend.step_plan import _chunk_table_kernel
from kda_backend.token_spec import TokenSpec
from kda_backend.verify.fused import verify_kernel
from kda_backend.verify_records.fused import commit_records_kernel, verify_records_kernel
from tests.offline import TARGETS, Report, compile_kernel, dump, report_of

REPORT = Path(__file__).with_name("compile_report.json")
CONFIGS = Path(__file__).parents[2] / "configs"
GATES = {"softplus": Gate.SOFTPLUS, "bounded": Gate.BOUNDED}

# Types of pointers that are not those of the tokens.
_POINTERS = {
    "a_log_ptr": "*fp32",
    "dt_bias_ptr": "*fp32",
    "total_ptr": "*fp32",
    "chunk_start_ptr": "*i32",
    "chunk_len_ptr": "*i32",
    "chunk_offsets_ptr": "*i32",
    "chunk_major_ptr": "*i32",
    "sequence_major_ptr": "*i32",
    "sequence_order_ptr": "*i32",
    "cu_seqlens_ptr": "*i32",
    "state_in_ptr": "*fp32",
    "state_out_ptr": "*fp32",
    "state_indices_ptr": "*i32",
    "has_initial_state_ptr": "*i1",
    "offsets_ptr": "*i32",
    "snapshot_chunks_ptr": "*i32",
    "snapshot_indices_ptr": "*i32",
    "snapshots_ptr": "*fp32",
    "state_ptr": "*fp32",
    "write_ptr": "*fp32",
    "write_indices_ptr": "*i32",
    "num_accepted_ptr": "*i32",
    "correction_ptr": "*fp32",
    "record_indices_ptr": "*i32",
    "kept_slots_ptr": "*i32",
    "kept_counts_ptr": "*i32",
    "written_slots_ptr": "*i32",
    "layer_offsets_ptr": "*i64",
    "conv_weight_ptr": "*fp32",
}
_SNAPSHOT_POOL = ("snapshot_indices_ptr", "stride_snapshot_n")
_SNAPSHOTS = ("snapshot_chunks_ptr", "snapshots_ptr", *_SNAPSHOT_POOL)
_INTERMEDIATE = ("chunk_states_ptr",)
_POOL = ("state_indices_ptr", "has_initial_state_ptr")
# What a call goes without: an engine's has a pool, FLA's form a state in and a state out.
_CONV = ("conv_state_ptr", "conv_weight_ptr")
_NORM = ("norm_weight_ptr", "norm_gate_ptr")
VARIANTS = {
    "conv, norm": ("conv_bias_ptr",),
    "bare": (*_CONV, "conv_bias_ptr", *_NORM),
    "slots": ("conv_bias_ptr", "windows_ptr"),
    "buffers": ("conv_bias_ptr", "num_accepted_ptr"),
    "held": ("conv_bias_ptr", "windows_ptr"),
    "layers": ("written_slots_ptr", "layer_offsets_ptr"),
    "layers apart": (),
    "pool": (*_SNAPSHOTS, *_INTERMEDIATE),
    "pool, snapshots": (*_INTERMEDIATE, *_SNAPSHOT_POOL),
    "pool, snapshots in a pool": _INTERMEDIATE,
    "functional, intermediate states": (*_SNAPSHOTS, *_POOL),
    "all": (),
}
_FP16_STATES = ", fp16 states"  # at the end of a variant's name
_STATES = ("state_ptr", "write_ptr", "state_in_ptr", "state_out_ptr", "snapshots_ptr")
SCANS = (
    "pool",
    "pool, snapshots",
    "pool, snapshots in a pool",
    "functional, intermediate states",
)
_TRITON_TYPE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Case = tuple[str, KernelLaunch, torch.dtype, str]
"""(name, launch, dtype of the inputs, variant)."""


def cases(arch: str) -> Iterator[Case]:
    """Each kernel of each row of the table, for 16-bit inputs at K = V = 128 and 64; then what
    needs most: fp32 inputs, and the largest head dimension, or fp32 inputs at 64 where prefill
    takes no wider rows. Then what surrounds a layer's prefill, which no table chooses."""
    rows = load_table(TABLES, TARGETS[arch][1], directory=CONFIGS).rows
    bf16, fp32 = torch.bfloat16, torch.float32
    fast_math = arch.startswith("sm")
    for dim, dtype in ((128, bf16), (64, bf16), (64, fp32), (128, fp32), (256, bf16)):
        for row in rows:
            is_wide = dim * dtype.itemsize > 256
            takes_wide = row.operator != "prefill" or "wide_rows" in row.features
            if (dim, dtype) == (64, fp32):
                if not takes_wide:
                    yield from _row_cases(row, dim, dtype, fast_math)
            elif takes_wide or not is_wide:
                yield from _row_cases(row, dim, dtype, fast_math)
    conv, _ = _short_conv_kernel(3 * 32 * 128, fast_math)
    yield "short_conv bf16", conv, torch.bfloat16, "pool"
    yield "chunk_table", _chunk_table_kernel(), torch.bfloat16, "all"
    checkpoints, _ = _store_checkpoints_kernel(4)
    yield "store_checkpoints bf16", checkpoints, torch.bfloat16, "all"
    for dim in (128, 64):
        norm, _ = _gated_norm_kernel(dim, fast_math)
        yield f"gated_norm {dim} bf16", norm, torch.bfloat16, "pool"


def _row_cases(row: Row, dim: int, dtype: torch.dtype, has_ptx: bool) -> Iterator[Case]:
    """The kernels of one row for one head dimension and one dtype of the inputs."""
    bounds = "" if row.max_grid is None else f" to grid {row.max_grid}"
    size = f"{dim} {_TRITON_TYPE[dtype]}"
    usual = dim <= 128 and dtype == torch.bfloat16
    for name in GATES if usual else ("softplus",):
        model = (row, TokenSpec(has_ptx, 1, dim, dim, GATES[name], Beta.SIGMOID, True))
        narrow = usual and dim == 128 and name == "softplus"
        of_states = ("", _FP16_STATES) if narrow else ("",)
        if row.name == "recurrent":
            kernel, _ = _recurrent_kernel(*model, True)
            for states in of_states:
                yield f"recurrent {size} {name}{states}{bounds}", kernel, dtype, f"pool{states}"
        elif (row.operator, row.name) == ("decode_step", "fused") and dim <= 128:
            for variant in ("bare", *(f"conv, norm{states}" for states in of_states)):
                kernel, _ = step_kernel(row.params, model[1], variant == "bare")
                yield f"decode_step {size} {name} {variant}{bounds}", kernel, dtype, variant
        elif (row.operator, row.name) == ("verify", "fused") and dim <= 128:
            for variant in ("slots", *(f"buffers{states}" for states in of_states)):
                kernel = verify_kernel(row.params, model[1])
                yield f"verify_step {size} {name} {variant}{bounds}", kernel, dtype, variant
        elif (row.operator, row.name) == ("verify_records", "fused") and dim <= 128:
            kernel = verify_records_kernel(row.params, model[1], True)
            for variant in ("buffers", *(f"held{states}" for states in of_states)):
                yield f"verify_records {size} {name} {variant}{bounds}", kernel, dtype, variant
            kernel, _ = commit_records_kernel(row.params, dim, dim, GATES[name], has_ptx)
            for states in of_states:
                variant = f"layers{states}"
                yield f"commit_records {size} {name}{states}{bounds}", kernel, dtype, variant
            if narrow:  # vLLM's own commit has states in other formats
                variant = f"layers apart{_FP16_STATES}"
                yield f"commit_records {size} {name} {variant}{bounds}", kernel, dtype, variant
        elif row.name == "two_stage":
            kernels = _prefill_kernels(row, dim, dtype, GATES[name], 0, has_ptx)
            yield f"intra {size} {name}{bounds}", kernels.intra, dtype, "pool"
    if row.name == "two_stage":
        scans = (*SCANS, f"pool, snapshots in a pool{_FP16_STATES}")
        for variant in scans if usual and dim == 128 else ("pool",):
            snapshots = int("snapshots" in variant)
            kernels = _prefill_kernels(row, dim, dtype, Gate.SOFTPLUS, snapshots, has_ptx)
            for rows, scan in kernels.scans.items():
                yield f"scan {rows} of {size} {variant}{bounds}", scan, dtype, variant


def _prefill_kernels(
    row: Row, dim: int, dtype: torch.dtype, gate: Gate, snapshots: int, has_ptx: bool
) -> _TwoStageKernels:
    operand = torch.float32 if dtype == torch.float32 else torch.float16
    spec = TokenSpec(has_ptx, 1, dim, dim, gate, Beta.SIGMOID, True)
    return _two_stage_kernels(row, spec, operand, snapshots, True)


def compile_case(arch: str, case: Case) -> dict[str, int]:
    _, launch, dtype, variant = case
    kernel = launch._fn
    constexprs, options = {}, {}
    for name, value in launch._kwargs.items():
        (constexprs if name in kernel.arg_names else options)[name] = value
    token = f"*{_TRITON_TYPE[dtype]}"
    tile = "*fp32" if dtype == torch.float32 else "*fp16"
    pointers = _POINTERS | {"tile_ptr": tile}
    if variant.endswith(_FP16_STATES):
        variant = variant.removesuffix(_FP16_STATES)
        pointers |= dict.fromkeys(_STATES, "*fp16")
    types: dict[str, str] = {}
    aligned = set()
    for name in kernel.arg_names:
        if name in constexprs:
            continue
        # decode takes the sequences of an engine's step as a batch
        batch = name == "cu_seqlens_ptr" and "tokens_per_sequence" in kernel.arg_names
        if name in VARIANTS[variant] or batch:
            constexprs[name] = None
        elif name.startswith("stride_") and name.endswith("_k"):
            constexprs[name] = 1
        elif name in ("stride_conv_state_c", "stride_windows_c"):
            constexprs[name] = 1  # the layout of vLLM's SD and sglang's pools
        elif name.endswith("_ptr"):
            types[name] = pointers.get(name, token)
            aligned.add(name)
        elif name in ("scale", "lower_bound", "eps"):
            types[name] = "fp32"
        else:
            types[name] = "i32"
            if name == "C" or (name.startswith("stride_") and "beta" not in name):
                aligned.add(name)
    return compile_kernel(arch, kernel, types, constexprs, options, frozenset(aligned))


def report(arch: str) -> Report:
    """One line for each distinct kernel: rows whose parameters agree share it."""
    lines: dict[str, dict[str, Any]] = {}
    seen: dict[object, str] = {}
    for case in cases(arch):
        name, launch, dtype, variant = case
        key = (launch._fn.__name__, tuple(launch._kwargs.items()), dtype, variant)
        if key in seen:
            continue
        seen[key] = name
        lines[name] = {"num_warps": launch._kwargs["num_warps"], **compile_case(arch, case)}
    return lines


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        # a process and an empty cache for each architecture, as in the test
        with tempfile.TemporaryDirectory() as cache:
            parts = {a: report_of("tests.kda.compile_report", a, Path(cache)) for a in TARGETS}
        REPORT.write_text(dump(parts), encoding="utf-8")
    else:
        print(json.dumps(report(sys.argv[1])))
