"""A layer whose convolution is made inside the Hopper prefill, on the GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backend_core.tables.load import load_table
from backend_core.target import detect_target
from kda_backend import layer
from kda_backend.launch_params import TABLES
from kda_backend.selection import KdaSelection, KdaShape, select
from tests.kda.cases import Backend
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


@pytest.mark.parametrize("taps", [torch.float32, torch.bfloat16])
def test_a_layer_that_convolves_in_the_kernel(seed: int, taps: torch.dtype) -> None:
    model = Model(Backend("kernels_128", torch.device("cuda")), seed, LENGTHS, heads=4, dim=128)
    model.qkv = model.qkv.contiguous()  # rows off 16 bytes are copied behind a convolution
    model.weights = model.weights._replace(conv=model.weights.conv.to(taps))
    model.selection = selection_with(model.selection.shape, fused_conv_tiles=1)
    check(model, layer.prefill, INDICES, INITIAL)
