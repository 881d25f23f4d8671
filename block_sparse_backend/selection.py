"""The paths that serve a kind of call on a device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from backend_core.operator import Selection, forced, select
from backend_core.tables.load import load_table
from backend_core.tables.schema import NoParams, Row
from backend_core.target import Target, detect_target
from block_sparse_backend.launch_params import TABLES
from block_sparse_backend.spec import BlockSparseSpec, QuantisedSpec, SageMode


def selection_for(
    operator: str, name: str, x: Tensor, spec: Any, path: str | None = None
) -> Selection[Any, Any]:
    """The paths that serve such calls where a tensor is, or the one that the caller names.

    Args:
        name, x: a tensor of the call, by its name.

    Raises:
        ValueError: there is no such path, or it lacks what the call needs; or kernels serve such
            calls and cannot read the tensor.
        LookupError: no path can serve the call.
    """
    found = _selection(operator, detect_target(x.device), spec, path)
    found.expect_device(name, x)
    return found


@functools.lru_cache(maxsize=1024)
def _selection(name: str, target: Target, spec: Any, path: str | None) -> Selection[Any, Any]:
    if path is None:
        return select(TABLES, name, target, spec)
    operator = TABLES.operator(name)
    if path not in operator.paths:
        raise ValueError(f"path must be one of {', '.join(operator.paths)}, got {path!r}")
    needs = operator.requires(spec)
    rows = [
        row for row in load_table(TABLES, target).rows if (row.operator, row.name) == (name, path)
    ]
    if not rows and path not in ("torch", "triton"):
        raise ValueError(f"path {path} needs Hopper, got {target.name}")
    if not rows:
        rows = [Row(path, name, None, needs, NoParams(), False, "as called")]
    row = min(rows, key=lambda row: len(needs - row.features))
    if missing := needs - row.features:
        raise ValueError(f"path {path} lacks {', '.join(sorted(missing))}, which this call needs")
    return forced(TABLES, target, spec, row)


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
    blocks: tuple[int, int] = _selection(operator, target, spec, None).rows[0].params.blocks
    return blocks
