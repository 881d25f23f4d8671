"""The paths of DeepSeek-V4.1's compressors, as the adapters of both engines log them."""

from __future__ import annotations

import torch

from backend_core.engines.log import chosen
from backend_core.target import detect_target
from dsv4_backend.low_ratio_step import low_ratio_selection
from dsv4_backend.spec import LowRatioSpec


def lines_of(device: torch.device, spec: LowRatioSpec) -> list[str]:
    """The lines for a kind of compressor.

    Raises:
        LookupError: no path serves it on this device.
    """
    target = detect_target(device)
    selection = low_ratio_selection(target, spec)
    paths = ", ".join(dict.fromkeys(row.name for row in selection.rows))
    formats = f"{spec.main.cache_format}, {spec.index.cache_format}"
    layers = f"DeepSeek-V4.1's compressors of ratio {spec.compress_ratio} ({formats})"
    return [*chosen(layers, target, paths, (), (selection,))]
