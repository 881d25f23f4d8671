"""The time of a launch without work, in a CUDA graph of several."""

from __future__ import annotations

import torch
import triton

from backend_core.testing.timing import graph_time_ms


@triton.jit
def empty_kernel(x_ptr):  # type: ignore[no-untyped-def]
    pass


def empty_launch_ms() -> float:
    x = torch.empty(1, device="cuda")
    return graph_time_ms(lambda: empty_kernel[(1,)](x), calls=20)
