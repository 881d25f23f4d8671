"""The paths of DeepSeek-V4.1's compressors, as the adapters of both engines log them."""

from __future__ import annotations

import torch

from backend_core.engines.log import chosen
from backend_core.target import detect_target
from dsv4_backend.spec import V41Spec
from dsv4_backend.v41_step import v41_selection


def lines_of(device: torch.device, spec: V41Spec) -> list[str]:
    """The lines for a kind of compressor.

    Raises:
        LookupError: no path serves it on this device.
    """
    target = detect_target(device)
    selection = v41_selection(target, spec)
    paths = ", ".join(dict.fromkeys(row.name for row in selection.rows))
    formats = f"{spec.main.cache_format}, {spec.index.cache_format}"
    layers = f"DeepSeek-V4.1's compressors of ratio {spec.compress_ratio} ({formats})"
    return [*chosen(layers, target, paths, (), (selection,))]
