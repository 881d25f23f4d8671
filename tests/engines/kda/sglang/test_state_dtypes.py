"""States of the dtype that ``--mamba-ssm-dtype`` asks for: outputs, slots and what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_layer, sglang_scratch
from kda_backend.prefill.arguments_sm90 import PrefillVariant
from tests.engines.kda.sglang import test_drafts, test_layer
from tests.engines.kda.sglang.harness import LAYERS, Served
from tests.engines.kda.sglang.test_layer import definitions, fresh_slots, tokens

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
Asked = tuple[Served, torch.dtype, list[PrefillVariant]]


@pytest.fixture(params=DTYPES)
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """A server with drafts; the dtype; the kernels that compile meanwhile."""
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", request.param)  # by the option too, for good
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    variants: list[PrefillVariant] = []

    def compiled(selection: Any, asked_for: list[PrefillVariant]) -> list[Any]:
        variants.extend(asked_for)
        return []

    monkeypatch.setattr(sglang_layer, "begin_to_compile", compiled)
    with torch.no_grad():
        served = Served(*test_drafts.options(), "--mamba-ssm-dtype", request.param)
        yield served, DTYPES[request.param], variants


def test_pools_and_kernels_have_it(asked: Asked) -> None:
    served, dtype, variants = asked
    assert served.states(0)[1].dtype == dtype
    cache = served.pool.mamba2_layer_cache(LAYERS[0])
    assert cache.intermediate_ssm.dtype == dtype
    sglang_layer.reserve(served.runner)  # before there are pools
    assert {variant.state_dtype for variant in variants} == {dtype}
    assert sglang_scratch.state_dtype_of(served.runner) == dtype


def test_prefills_and_decodes(asked: Asked) -> None:
    test_layer.test_prefill_of_a_ragged_batch(asked[0])
    test_layer.test_decode_with_padded_requests(asked[0])


def test_tracked_states(asked: Asked) -> None:
    """sglang rounds the scan's fp32 copies once."""
    served = asked[0]
    served.fill_pools(seed=7)
    fresh = fresh_slots(served, [3], [0])
    x = tokens(70, seed=8)
    requests = [definitions(served, layer, [3], fresh)[0] for layer in range(len(LAYERS))]
    batch = served.batch(ForwardMode.EXTEND, [70], [0], [3], tracked=[(0, 8)])
    served.forward(x, batch)
    for layer, request in enumerate(requests):
        request.run(x[:64])
        assert relative_error(served.states(layer)[1][8], request.state[0]) < 1e-2


@pytest.mark.parametrize("asked", ["float16"], indirect=True)
def test_tracked_states_are_cut_off_where_float16_ends(asked: Asked) -> None:
    """As the request's own, also behind a chunk of the prompt, where sglang copies from fp32."""
    served = asked[0]
    for layer in served.layers:
        layer.qkv_conv1d.weight.data[2 * len(layer.qkv_conv1d.weight) // 3 :] *= 1e6  # of values
    served.fill_pools(seed=7)
    fresh_slots(served, [3], [0])
    batch = served.batch(ForwardMode.EXTEND, [70], [0], [3], tracked=[(0, 8)])
    served.forward(tokens(70, seed=8), batch)
    for layer in range(len(LAYERS)):
        states = served.states(layer)[1]
        for slot in (3, 8):
            assert states[slot].isfinite().all() and (states[slot].abs() == 65504.0).any()


def test_drafts_agree_with_upstreams(asked: Asked) -> None:
    test_drafts.test_upstreams_kernels_agree(asked[0], [4, 1, 2])
