"""Arithmetic in torch that a caller's autocast does not change."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Values = ParamSpec("Values")
Result = TypeVar("Result")


def without_autocast(run: Callable[Values, Result]) -> Callable[Values, Result]:
    """``run`` with autocast off, whose products of fp32 would be made in 16 bits otherwise."""

    @functools.wraps(run)
    def exact(*values: Values.args, **named: Values.kwargs) -> Result:
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return run(*values, **named)

    return exact
