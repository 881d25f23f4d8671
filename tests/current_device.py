"""The current GPU as a test moves it: calls whose tensors are on another one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from triton.runtime import interpreter

Results = tuple[Any, ...]
Call = Callable[[], Results]
Make = Callable[[torch.device], Call]
"""Gives a call whose tensors are on a device."""

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@dataclass
class Seen:
    """What a call did.

    Attributes:
        entered: devices that it made the current one.
        launched: the current device of each kernel that the interpreter ran.
    """

    entered: list[Any] = field(default_factory=list)
    launched: list[Any] = field(default_factory=list)


def run_elsewhere(call: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[Results, Seen]:
    """A call on the CPU as if it were a GPU that is not the current one.

    Whether tensors are elsewhere is a stub in every module that asks.
    """
    seen = Seen()

    class Current:
        """The device of a ``with`` statement, as `torch.cuda.device` sets it."""

        now: ClassVar[list[object]] = [None]

        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            seen.entered.append(self.device)
            self.now.append(self.device)

        def __exit__(self, *_: object) -> None:
            self.now.pop()

    launch = interpreter.GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.launched.append(Current.now[-1])
        return launch(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        for module in list(sys.modules.values()):
            if "is_elsewhere" in vars(module) and module.__name__.partition(".")[0] != "tests":
                patch.setattr(module, "is_elsewhere", lambda x: Current.now[-1] != x.device)
        patch.setattr(torch.cuda, "device", Current)
        patch.setattr(interpreter.GridExecutor, "__call__", recorded)
        results = call()
    assert Current.now == [None]
    return results, seen


def assert_alike(got: Results, want: Results) -> None:
    """Tensors with the same values, wherever they are; anything else equal."""
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x.cpu(), y.cpu(), rtol=0, atol=0, equal_nan=True)
        else:
            assert x == y


def check_elsewhere(make: Make, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """`run_elsewhere`, with the results of the same call where it is."""
    want, call = make(torch.device("cpu"))(), make(torch.device("cpu"))
    got, seen = run_elsewhere(call, monkeypatch)
    assert_alike(got, want)
    return seen


def check_on_second_gpu(make: Make) -> None:
    """The same call on two GPUs, of which the first is the current one."""
    first, second = (torch.device("cuda", n) for n in range(2))
    want, call = make(first)(), make(second)
    got = call()
    torch.cuda.synchronize(second)
    assert torch.cuda.current_device() == 0
    assert all(x.device == second for x in got if isinstance(x, torch.Tensor))
    assert_alike(got, want)
