"""What the tests of block-sparse attention compare results by."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.testing.numerics import relative_error
from block_sparse_backend.testing.cases import LSE_ERROR, OUT_ERROR


def assert_matches(
    got: tuple[Tensor, Tensor],
    want: tuple[Tensor, Tensor],
    tolerance: tuple[float, float] = (OUT_ERROR, LSE_ERROR),
) -> None:
    """Output, LSE and dead rows of an operator beside the float64 reference."""
    (out, lse), (ref, ref_lse) = ((a.cpu().double(), b.cpu().double()) for a, b in (got, want))
    dead = ref_lse.isinf()
    assert torch.equal(lse.isneginf(), dead), "rows that see nothing"
    assert bool((out[dead] == 0).all()), "output of rows that see nothing"
    if not bool(dead.all()):
        assert relative_error(out, ref) < tolerance[0]
        assert float((lse - ref_lse)[~dead].abs().max()) < tolerance[1]
