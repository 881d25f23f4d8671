"""The calls of the compressor's operators that ``kda-dsv4 tune`` times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from backend_cli import check_dsv4
from backend_cli.check_engine import Engine, make_engine
from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from dsv4_backend import compress_decode_, compress_decode_pair_, compress_prefill_

Call = Callable[[], object]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def measure(path: KernelPath, target: Target, grid: int) -> Call:
    """``grid`` requests that decode, each at the end of a window, or windows of one prompt."""
    kind, _, phase = path.operator.rpartition("_")
    kinds = ("main_c4", "indexer") if kind == "pair" else (kind,)
    ratio = 128 if kind == "main_c128" else 4
    lengths = (grid * ratio,) if phase == "prefill" else (2 * ratio,) * grid
    engines = [make_engine(name, "paged", False, lengths=lengths) for name in kinds]
    for engine in engines:
        engine.state.nan_to_num_(0.5)
    parts, plans = zip(*(_on_device(engine, phase) for engine in engines), strict=True)
    check_dsv4.force(path, target, tuple(engines), plans)
    if kind == "pair":
        object.__setattr__(parts[1][0], "rope_table", parts[0][0].rope_table)
        object.__setattr__(plans[1], "requests", plans[0].requests)
        return lambda: compress_decode_pair_(*parts, *plans, target=target)
    operator: Any = compress_decode_ if phase == "decode" else compress_prefill_
    return lambda: operator(*parts[0], plans[0], target=target)


def _on_device(engine: Engine, phase: str) -> tuple[Any, Any]:
    whole = [(0, length) for length in engine.lengths]
    plan: Any
    if phase == "prefill":
        plan, rows = engine.prefill_plan(whole), engine.rows(whole)
    else:
        last = [length - 1 for length in engine.lengths]
        plan = dataclasses.replace(engine.decode_plan(list(last)), is_settled=True)
        rows = engine.rows([(position, position + 1) for position in last])
    ((part, moved),) = check_dsv4.to_device((engine,), (plan,), [rows], torch.device(DEVICE))
    return part, moved
