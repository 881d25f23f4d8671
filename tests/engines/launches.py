"""Which variant of a kernel a launch selects: what has to be compiled before serving."""

from __future__ import annotations

from typing import Any

import torch

from backend_core.launch.triton import KernelLaunch

Variant = tuple[Any, ...]


def variant(launch: KernelLaunch, args: tuple[Any, ...]) -> Variant:
    """What Triton compiles a kernel for: the kernel, its constants, and each argument's class."""
    kernel = launch._fn
    plain = kernel.kwargs["do_not_specialize"] or ()
    unaligned = kernel.kwargs["do_not_specialize_on_alignment"] or ()
    key: list[Any] = [kernel.fn.__name__, tuple(sorted(launch._kwargs.items()))]
    for name, arg in zip(launch.argument_names, args, strict=False):
        if isinstance(arg, torch.Tensor):
            aligned = arg.data_ptr() % 16 == 0 or name in unaligned
            key.append((name, arg.dtype, aligned))
        elif type(arg) is int and name not in plain:
            key.append((name, arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31))
        else:
            key.append((name, type(arg)))
    return tuple(key)
