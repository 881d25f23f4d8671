"""The test kit of `dsv4_backend.testing` with the device and the target of this test run."""

from __future__ import annotations

import torch

from backend_core.target import KNOWN_TARGETS, Target, detect_target
from dsv4_backend import CompressorLayer
from dsv4_backend.testing.engine import (
    MAX_POSITIONS,
    POISON,
    Chunk,
    CompressorEngine,
    default_device,
    make_history,
    make_layer,
    make_spec,
    rope_table,
)
from dsv4_backend.testing.oracle import equal_share, expected_rows

__all__ = [
    "DEVICE",
    "MAX_POSITIONS",
    "POISON",
    "TARGET",
    "Chunk",
    "CompressorEngine",
    "assert_records",
    "expected_rows",
    "make_history",
    "make_layer",
    "make_spec",
    "rope_table",
    "settle",
]

DEVICE = default_device()
# Kernel tests on the CPU run, interpreted, what the Hopper table selects.
TARGET: Target = detect_target(DEVICE) if DEVICE.type == "cuda" else KNOWN_TARGETS["H200"]


def settle() -> None:
    """A launch that waits for all before it, as an engine's are before a decode step."""
    torch.zeros(1, device=DEVICE).add_(1)


def assert_records(
    engine: CompressorEngine, layer: CompressorLayer, want: dict[int, torch.Tensor]
) -> None:
    """The cache holds the quantised float64 rows in exactly these slots, and poison elsewhere."""
    equal = equal_share(engine.caches, engine.spec, want)
    assert equal > 0.995, f"only {equal:.4f} of the bytes are equal"
