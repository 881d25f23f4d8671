"""What the tables may turn on in the Hopper prefill, on the GPU: direct rows of a bounded gate, a
layer's convolution inside the kernel, the scan's buffers apart and intra-chunk CTAs in turn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backend_core.tables.select import load_table
from backend_core.target import detect_target
from kda_backend import chunk_kda, layer
from kda_backend.launch_params import TABLES
from kda_backend.selection import KdaSelection, KdaShape, select
from kda_backend.testing.cases import make_case
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import Backend, assert_result
from tests.kda.test_layer import INDICES, INITIAL, LENGTHS, Model, check

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="the kernels are Hopper's"),
]


def selection_with(shape: KdaShape, **params: Any) -> KdaSelection:
    """The two stages with other parameters than the table's."""
    rows = load_table(TABLES, detect_target()).rows
    row: Any = next(row for row in rows if row.name == "two_stage_sm90")
    row = dataclasses.replace(row, params=dataclasses.replace(row.params, **params))
    return select(detect_target(), shape).with_path(row)


@pytest.mark.parametrize("lengths", [(700, 65, 3), (9, 64)], ids=["two stages", "one launch"])
@pytest.mark.parametrize("regime", REGIMES)
def test_direct_rows(seed: int, regime: str, lengths: tuple[int, ...]) -> None:
    model: dict[str, Any] = {"heads": 4, "key_dim": 128, "value_dim": 128, "regime": regime}
    case = make_case(seed, lengths, gate="bounded", device="cuda", **model)
    o, state = chunk_kda(
        *case.tokens,
        **case.options(),
        cu_seqlens=case.cu_seqlens,
        initial_state=case.state,
        output_final_state=True,
        state_v_first=True,
        selection=selection_with(case.shape, bounded_rows="direct"),
    )
    assert_result(case, o, state)


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("regime", REGIMES)
def test_buffers_apart_and_ctas_in_turn(seed: int, regime: str, gate: str) -> None:
    """As many tiles as CTAs take in turns, by the schedules that have whole heads scanned; the bits
    are those of the table's row."""
    model: dict[str, Any] = {"heads": 32, "key_dim": 128, "value_dim": 128, "regime": regime}
    case = make_case(seed, (1500, 65, 0, 3), gate=gate, device="cuda", **model)
    forms = (
        {},
        {"scan_buffers": "apart", "scan_state_ahead": True},
        {"scan_buffers": "apart", "scan_output_early": True, "intra_stagger_ns": 2500},
    )
    found = [
        chunk_kda(
            *case.tokens,
            **case.options(),
            cu_seqlens=case.cu_seqlens,
            initial_state=case.state,
            output_final_state=True,
            state_v_first=True,
            selection=selection_with(case.shape, **params),
        )
        for params in forms
    ]
    assert_result(case, *found[0])
    for o, state in found[1:]:
        assert torch.equal(o, found[0][0]) and torch.equal(state, found[0][1])


@pytest.mark.parametrize("taps", [torch.float32, torch.bfloat16])
def test_a_layer_that_convolves_in_the_kernel(seed: int, taps: torch.dtype) -> None:
    model = Model(Backend("kernels_128", torch.device("cuda")), seed, LENGTHS, heads=4, dim=128)
    model.weights = dataclasses.replace(model.weights, conv=model.weights.conv.to(taps))
    model.selection = selection_with(model.selection.shape, fused_conv_tiles=1)
    check(model, layer.prefill, INDICES, INITIAL)
