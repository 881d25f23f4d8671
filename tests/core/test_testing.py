"""The kit that every family's tests, ``check`` and benchmarks measure with."""

from __future__ import annotations

import math

import pytest
import torch

from backend_core.testing.numerics import relative_error

CPU = torch.device("cpu")


def test_the_relative_error_is_of_the_whole_tensor() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(want.bfloat16(), want) == 0.0


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([math.nan], [1.0], math.inf),
        ([math.inf], [1.0], math.inf),
        ([math.inf], [math.inf], math.inf),
        ([1e-30], [0.0], math.inf),
        ([0.0], [0.0], 0.0),
    ],
)
def test_what_is_not_finite_never_passes(got: list[float], want: list[float], error: float) -> None:
    assert relative_error(torch.tensor(got), torch.tensor(want)) == error
