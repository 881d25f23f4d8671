"""Plans that are made once for each shape of call, and serve all streams."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from backend_core.launch.streams import is_capturing
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import BlockPlan

Plan = TypeVar("Plan")
_KEPT = 64


class Plans(Generic[Plan]):
    """Plans that are kept for the calls that follow, on any stream: the last 64, and for good those
    that a CUDA graph has seen.

    Args:
        make: makes a plan on a device, from values that say which.
    """

    def __init__(self, make: Callable[..., Plan]) -> None:
        self._make = make
        self._kept: dict[tuple[Any, ...], Plan] = {}
        self._in_graphs: dict[tuple[Any, ...], Plan] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device, *key: Any) -> Plan:
        """The plan for a device and values. One that is first needed in a capture belongs to the
        graph, whose replay makes it, and is not kept."""
        at = (device, *key)
        plan = self._in_graphs.get(at) or self._kept.get(at)
        if is_capturing(device):
            if plan is None:
                return self._make(device, *key)
            self._in_graphs[at] = plan
        elif plan is None:
            plan = self._make(device, *key)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            with self._lock:
                while len(self._kept) >= _KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[at] = plan
        return plan


def _interval(
    make: Callable[..., BlockPlan],
    device: torch.device,
    m: int,
    n: int,
    heads: int,
    batch: int,
    block_m: int,
    block_n: int,
) -> BlockPlan:
    return make(m, n, heads, batch=batch, block_m=block_m, block_n=block_n, device=device)


dense = Plans(functools.partial(_interval, intervals.dense))
"""``intervals.dense`` of queries, keys, heads, batch entries, and of a tile's and a block's
tokens."""
causal = Plans(functools.partial(_interval, intervals.causal))
"""``intervals.causal``, likewise."""
