"""What tests of records call one code: each neighbour is within it, the code after it is not."""

from __future__ import annotations

import torch

from dsv4_backend.testing.engine import make_spec
from dsv4_backend.testing.oracle import Record, within_one_code

SPEC = make_spec("indexer_mxfp4_planes", rounding="aiter")


def rows(code: int, exponent: int) -> Record:
    """A record of one code everywhere: (data [1, 64], scales [1, 4])."""
    data = torch.full((1, 64), code * 17, dtype=torch.uint8)
    return data, torch.full((1, 4), 127 + exponent, dtype=torch.uint8)


def is_near(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> bool:
    return bool(within_one_code(SPEC, one, other).all())


def test_codes_of_one_scale() -> None:
    values = [*range(15, 8, -1), *range(8)]  # -6 to 6, without -0
    for i, one in enumerate(values):
        for j, other in enumerate(values):
            assert is_near(rows(one, -3), rows(other, -3)) == (abs(i - j) <= 1), (one, other)


def test_the_scale_of_the_next_power_of_two() -> None:
    """4 and 6 of a scale are 2 and 3 of the next one."""
    for fine, coarse in ((6, 4), (7, 5), (1, 0), (1, 1), (3, 2)):
        assert is_near(rows(fine, 0), rows(coarse, 1)), (fine, coarse)
    assert not is_near(rows(7, 0), rows(7, 1))
    assert not is_near(rows(6, 0), rows(6, 1))
