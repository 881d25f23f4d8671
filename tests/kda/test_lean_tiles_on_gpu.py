"""Tiles in fewer instructions (`PrefillCostModel.lean_tiles`), on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kda_backend import chunk_kda
from kda_backend.testing.cases import make_case
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import assert_result
from tests.kda.test_conv_on_gpu import ON_HOPPER, selection_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="the kernels are Hopper's"),
]


@pytest.mark.parametrize("lengths", [(1500, 65, 0, 3), (9, 64)], ids=["two stages", "one launch"])
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("regime", REGIMES)
def test_against_float64(seed: int, regime: str, gate: str, lengths: tuple[int, ...]) -> None:
    """The same bits twice, by CTAs of which an SM has two (4 heads) and four (32 heads)."""
    for heads in (4, 32):
        model: dict[str, Any] = {"heads": heads, "key_dim": 128, "value_dim": 128}
        case = make_case(seed, lengths, gate=gate, regime=regime, device="cuda", **model)
        found = [
            chunk_kda(
                *case.tokens,
                **case.options(),
                cu_seqlens=case.cu_seqlens,
                initial_state=case.state,
                output_final_state=True,
                state_v_first=True,
                selection=selection_with(case.shape, lean_tiles=True),
            )
            for _ in range(2)
        ]
        assert_result(case, *found[0])
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
