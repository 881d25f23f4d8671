"""The decode step in torch, which serves on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kda_backend import torch_steps

if TYPE_CHECKING:
    from backend_core.tables.schema import KernelPath
    from backend_core.target import Target
    from kda_backend.contract.values import DecodeCall
    from kda_backend.selection import KdaShape


def bind(row: KernelPath, spec: KdaShape, target: Target) -> Callable[[DecodeCall], None]:
    return functools.partial(torch_steps.step, row)
