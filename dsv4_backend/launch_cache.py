"""What a caller of the compressors keeps between its calls."""

from __future__ import annotations

from backend_core.ready import Ready
from dsv4_backend import low_ratio_step, step


class LaunchCache:
    """The checks and packed arguments of earlier calls, for later calls that agree with them.

    The caller of the operators makes one, for instance an engine's adapter of one layer, and keeps
    it as long as that layer lives. Two calls agree if they have the same layer and kind of step
    plan, and if shapes (but for the number of rows), strides, dtypes, devices and addresses of
    weights, state and cache are the same. It keeps no state and no cache alive. It keeps the memory
    of paths that split channels as long as it lives itself, since a CUDA graph may hold that.
    """

    def __init__(self) -> None:
        self.step = Ready(
            step.bind,
            addresses=(2, 3, 4),
            any_length=(1,),
            kept=64,
            outlived=lambda b: b.memory or None,
        )
        self.low_ratio = Ready(low_ratio_step.bind, addresses=(2, 3, 4), any_length=(1, 5), kept=64)
