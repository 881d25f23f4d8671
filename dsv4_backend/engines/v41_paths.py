"""The paths of DeepSeek-V4.1's compressors, as the adapters of both engines log them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from backend_core.engines.log import chosen
from backend_core.target import detect_target
from dsv4_backend.spec import V41Spec
from dsv4_backend.v41_step import v41_selection


@functools.cache
def say_paths(say: Callable[..., None], device: torch.device, spec: V41Spec) -> None:
    """Log once, by the engine's ``say``, which paths serve a kind of compressor.

    Raises:
        LookupError: no path serves it on this device.
    """
    target = detect_target(device)
    selection = v41_selection(target, spec)
    paths = ", ".join(dict.fromkeys(row.name for row in selection.rows))
    formats = f"{spec.main.cache_format}, {spec.index.cache_format}"
    layers = f"DeepSeek-V4.1's compressors of ratio {spec.compress_ratio} ({formats})"
    say(*chosen(layers, target, paths, (), (selection,)))
