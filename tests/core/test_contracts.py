from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from backend_core import contracts
from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride, once


def test_right_arguments_pass() -> None:
    x = torch.zeros(1, 7, 4, 64, dtype=torch.bfloat16)
    expect_shape("k", x, (1, 7, 4, 64))
    expect_shape("k", x, (1, "T", None, 64))
    expect_shape("scalar", torch.zeros(()), ())
    expect_dtype("k", x, torch.float32, torch.bfloat16)
    expect_device("k", x, torch.device("cpu"))
    expect_stride("k", x, -1, 1)
    expect_stride("k", x, 1, 256)
    expect_stride("one column", torch.zeros(4, 2)[:, :1], 1, 1)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ((1, "T", "H", 128), "k must have shape [1, T, H, 128], got [1, 7, 4, 64]"),
        ((1, "T", 4), "k must have shape [1, T, 4], got [1, 7, 4, 64]"),
        ((2, None, 4, 64), "k must have shape [2, any, 4, 64], got [1, 7, 4, 64]"),
        ((), "k must have shape [], got [1, 7, 4, 64]"),
    ],
)
def test_shape_message(expected: tuple[int | str | None, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        expect_shape("k", torch.zeros(1, 7, 4, 64), expected)
    assert str(error.value) == message


def test_dtype_message() -> None:
    with pytest.raises(ValueError) as error:
        expect_dtype("g", torch.zeros(1, dtype=torch.float16), torch.bfloat16, torch.float32)
    assert str(error.value) == "g must have dtype bfloat16 or float32, got float16"


def test_device_message() -> None:
    with pytest.raises(ValueError) as error:
        expect_device("beta", torch.zeros(1, device="meta"), torch.device("cpu"))
    assert str(error.value) == "beta must be on cpu, got meta"


def test_stride_message() -> None:
    with pytest.raises(ValueError) as error:
        expect_stride("v", torch.zeros(8, 8).t(), -1, 1)
    assert str(error.value) == "v must have stride 1 in dimension -1, got 8"


class Check:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], options: object) -> int:
        if options == "wrong":
            raise ValueError("wrong")
        self.asked.append(options)
        return len(self.asked)


def test_a_check_is_made_once_for_calls_alike() -> None:
    check = Check()
    checked = once(check)
    x = torch.zeros(4, 4)
    assert checked((x, None), "a") == 1
    assert checked((torch.ones(4, 4), None), "a") == 1
    others = [x[:3], x.t()[:, :3], x.half(), torch.empty(4, 4, device="meta"), None]
    calls: list[tuple[object, object]] = [((other, None), "a") for other in others]
    calls += [((x, x), "a"), ((x, None), "b"), ((x, x.clone()), "a"), ((None, x), "a")]
    calls += [(None, "a"), ((x, None), "a")]
    first = [checked(*call) for call in calls]  # type: ignore[arg-type]
    assert len(set(first)) == len(calls)
    again = [checked(*call) for call in calls]  # type: ignore[arg-type]
    # what had come before a tensor or a None was new at its place may have been forgotten
    assert [checked(*call) for call in calls] == again  # type: ignore[arg-type]
    assert len(set(again)) == len(calls)
    assert checked((torch.ones(4, 4), None), "a") == again[-1]


def test_a_check_that_fails_is_made_again() -> None:
    checked = once(Check())
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong") as caught:
            checked((torch.zeros(1),), "wrong")
        assert caught.value.__context__ is None  # the user sees one error


def test_results_of_checks_are_limited_and_hold_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "_KEPT", 3)
    check = Check()
    checked = once(check)
    for _ in range(2):
        for size in range(5):
            x = torch.zeros(size)
            seen = weakref.ref(x)
            checked((x,), None)
            del x
            assert seen() is None
    assert len(check.asked) > 5


def test_threads_that_make_their_first_calls_at_once_all_get_their_results() -> None:
    x = torch.zeros(2, 3)
    calls = [((x, None), None, 0), ((x, x), x, 1), (None, x, 2), ((None, x), None, 3)]
    failures: list[BaseException] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads meet in every line
    try:
        for _ in range(100):
            checked = once(lambda tensors, tensor, number: number)
            begin = threading.Barrier(len(calls))
            arguments = (checked, calls, begin, failures)
            threads = [threading.Thread(target=_call, args=(n, *arguments)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def _call(
    number: int, checked: Any, calls: Any, begin: threading.Barrier, failures: list[BaseException]
) -> None:
    try:
        begin.wait()
        for call in (calls[number], *calls):
            assert checked(*call) == call[2]
    except BaseException as error:
        failures.append(error)
