"""Cases of MLA and of block-sparse attention: their kits' on each row of a table, and the operators
and variants that the rows can select and the kits leave out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from backend_core.family import families
from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend import selection
from mla_backend.decode import triton as mla_triton
from mla_backend.drop_ins.flashinfer import cascade
from mla_backend.sparse import triton as sparse_mla_triton
from tools.amdgcn import block_sparse_cases, mla_decode_cases
from tools.amdgcn.case import CPU, Answer, ExecutionCase
from tools.amdgcn.device import TARGETS

NUM_SMS = 4
"""Of the GPU that steps are planned for: few, so that small inputs have splits."""
_BOTH = (
    "mla_decode triton: 16 heads, drafts of 2",
    "sparse_mla triton: 8 heads, 1 query tokens, 1 splits",
    "block_sparse_int8",
)
_FURTHER = ("mla_decode: two levels, sinks", "block_sparse: packed sequences, bf16", "cascade")
HERE = ("shared prefix", "cascade of two levels", "predicted blocks")
"""Cases of the kit of which this folder has smaller ones, of more variants."""
QUICK = {"gfx942": _BOTH, "gfx950": (*_BOTH, *_FURTHER)}
LARGE = (
    "mla_decode triton: ragged",
    "sparse_mla triton: 8 heads, 2 query tokens, 3 splits",
    "sparse_mla triton: prefill over rows of bf16",
    "block_sparse: packed sequences, bf16",
    "block_sparse_int8",
    "cascade",
    "predict: causal, cdf",
)
"""These run as for tensors beyond 2 GiB, too."""


def all_cases(arch: str) -> Iterator[ExecutionCase]:
    kit, _ = _kit_cases("block_sparse", arch)
    found = _mla_cases(arch) | kit | block_sparse_cases.all_cases()
    for chosen in (QUICK[arch], LARGE):
        assert set(chosen) <= set(found), sorted(set(chosen) - set(found))
    for name, run in found.items():
        title, placed = f"attention {name}", _placed(run)
        yield ExecutionCase(title, arch, placed, False, name in QUICK[arch])
        if name in LARGE:
            yield ExecutionCase(f"{title}, over 2 GiB", arch, placed, True)


Runs = dict[str, Callable[[Target], Answer]]


def _mla_cases(arch: str) -> Runs:
    found, rows = _kit_cases("mla", arch)
    found |= mla_decode_cases.decode_cases(rows["mla_decode"])
    found |= mla_decode_cases.sparse_cases(rows["sparse_mla"])
    return found | mla_decode_cases.merge_cases()


def _kit_cases(name: str, arch: str) -> tuple[Runs, dict[str, Row]]:
    """A family's checks on each row of its table, and the rows by operator."""
    family = families()[name]
    rows = {row.operator: row for row in load_table(family.tables, TARGETS[arch]).rows}
    found: Runs = {}
    for row in rows.values():
        for check, case in family.check_cases(row).items():
            if check not in HERE:
                found[f"{row.operator} {row.name}: {check}"] = _of_kit(case)
    return found, rows


def _of_kit(case: Any) -> Callable[[Target], Answer]:
    def run(target: Target) -> Answer:
        answer: Answer = case(target, CPU)
        return answer

    return run


def _placed(run: Callable[[Target], Answer]) -> Callable[[Target], Answer]:
    def placed(target: Target) -> Answer:
        few = dataclasses.replace(target, num_sms=NUM_SMS)
        with _as_on(few):
            return run(few)

    return placed


@contextlib.contextmanager
def _as_on(target: Target) -> Iterator[None]:
    """CPU tensors select the target's rows, and products take the dtypes that they take there."""
    with contextlib.ExitStack() as stack:
        selects = mock.patch.object(selection, "detect_target", lambda device: target)
        stack.enter_context(selects)
        same = mock.patch.object(cascade, "operand_dtype", lambda x: x.dtype)
        stack.enter_context(same)
        for module in (mla_triton, sparse_mla_triton):
            stack.enter_context(mock.patch.object(module, "interprets", lambda: False))
        yield
