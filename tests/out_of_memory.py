"""A GPU whose memory is full: allocations that fail, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[int]]:
    """Within, the allocation of this number fails, from 0 on, as torch's do where nothing is left.

    Yields:
        one entry for each allocation so far.
    """
    seen: list[int] = []

    def counted(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocated(*args: Any, **named: Any) -> torch.Tensor:
            seen.append(len(seen))
            if seen[-1] == number:
                raise torch.OutOfMemoryError("planned by a test")
            return allocate(*args, **named)

        return allocated

    with monkeypatch.context() as patch:
        for name in ("new_empty", "new_zeros", "new_full"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
        for name in ("empty", "zeros", "full", "cat"):
            patch.setattr(torch, name, counted(getattr(torch, name)))
        yield seen
