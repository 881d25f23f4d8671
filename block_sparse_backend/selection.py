"""The paths that serve a kind of call on a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backend_core.operator import Selection, choose, select
from backend_core.tables.load import PathTable, load_table
from backend_core.tables.schema import NoParams, Operator, Row
from backend_core.target import Target, detect_target
from block_sparse_backend.launch_params import TABLES
from block_sparse_backend.spec import BlockSparseSpec, QuantisedSpec, SageMode


@dataclass(frozen=True, eq=False)
class Paths:
    """The rows from which the operators of a call choose: those of its device's table, or of the
    path that the caller names. Compared by identity."""

    table: PathTable
    target: Target

    def select(self, operator: str, spec: Any, name: str, x: Tensor) -> Selection[Any, Any]:
        """The paths that serve such calls where a tensor is.

        Args:
            name, x: a tensor of the call, by its name.

        Raises:
            ValueError: kernels serve such calls and cannot read the tensor.
            LookupError: no path can serve the call.
        """
        found = _chosen(self, operator, spec)
        found.expect_device(name, x)
        return found


def paths_on(device: torch.device, path: str | None, *operators: str) -> Paths:
    """The paths of a device for some operators.

    Raises:
        ValueError: an operator has no such path, or the device cannot run it.
    """
    return _paths(detect_target(device), path, operators)


@functools.lru_cache(maxsize=64)
def _paths(target: Target, path: str | None, operators: tuple[str, ...]) -> Paths:
    table = load_table(TABLES, target)
    if path is not None:
        rows = [
            row for name in operators for row in _named(TABLES.operator(name), path, table, target)
        ]
        table = replace(table, rows=tuple(rows))
    return Paths(table, target)


def _named(operator: Operator, path: str, table: PathTable, target: Target) -> list[Row]:
    """The rows of one path; where the table has none, one with all that the path can do."""
    if path not in operator.paths:
        raise ValueError(f"path must be one of {', '.join(operator.paths)}, got {path!r}")
    rows = [row for row in table.rows if (row.operator, row.name) == (operator.name, path)]
    if rows:
        return rows
    if path not in ("torch", "triton"):
        raise ValueError(f"path {path} needs Hopper, got {target.name}")
    features = frozenset(operator.features.get(path, "").split())
    return [Row(path, operator.name, None, features, NoParams(), False, "as called")]


@functools.lru_cache(maxsize=1024)
def _chosen(paths: Paths, operator: str, spec: Any) -> Selection[Any, Any]:
    return choose(paths.table, operator, paths.target, spec)


def default_blocks(device: torch.device, head_dim: int) -> tuple[int, int]:
    """(block_m, block_n) for plans of 16-bit attention on a device."""
    spec = BlockSparseSpec((head_dim, head_dim))
    block_m, block_n = _first_blocks("block_sparse", detect_target(device), spec)
    return block_m, block_n if head_dim <= 128 else min(block_n, 64)


def default_blocks_int8(device: torch.device) -> tuple[int, int]:
    """(block_m, block_n) for plans of 8-bit attention on a device."""
    return _first_blocks("block_sparse_int8", detect_target(device), _PLAIN)


_PLAIN = QuantisedSpec(SageMode(fp8_values=False))


@functools.lru_cache(maxsize=64)
def _first_blocks(operator: str, target: Target, spec: Any) -> tuple[int, int]:
    blocks: tuple[int, int] = select(TABLES, operator, target, spec).rows[0].params.blocks
    return blocks
