"""What is prepared for the calls of a step plan, and what ends it (docs/architecture.md)."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backend_core.ready import Prepared
from dsv4_backend import V41Step, compress_decode_, compress_v41_
from dsv4_backend.step import CompressorCall
from dsv4_backend.testing import v41 as kit
from tests.dsv4.cases import TARGET, CompressorEngine, make_history, make_layer, make_spec

pytestmark = pytest.mark.interpreter
CPU = torch.device("cpu")


class Compressor:
    """A decode step of DeepSeek-V4's compressor."""

    def __init__(self) -> None:
        spec = make_spec("fp8_ds_mla", 4)
        self.engine = engine = CompressorEngine("ring", spec, [8], device=CPU)
        self.plan = engine.decode_plan([(0, 8)])
        layer, history = make_layer(spec, device=CPU), make_history(spec, 8, 1, device=CPU)
        engine.fill_state(layer, 0, history[:-1])
        self.given: dict[str, Any] = {
            "layer": layer,
            "kv_score": history[-1:],
            "state": engine.state,
            "cache": engine.cache,
        }

    def run(self, plan: Any, **changed: Any) -> None:
        compress_decode_(**{**self.given, **changed}, step_plan=plan, target=TARGET)


@pytest.fixture
def compressor() -> Compressor:
    return Compressor()


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same with rows further apart."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 16)
    return wide[..., : x.shape[-1]].copy_(x)


def _off_16_bytes(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_zeros(x.numel() + 4)
    return whole[4 if x.element_size() == 1 else 1 :][: x.numel()].view(x.shape).copy_(x)


def test_layers_that_are_laid_out_alike_share_what_is_prepared(compressor: Compressor) -> None:
    """Addresses are those of each call: other memory is written, by the same launches."""
    plan, other = compressor.plan, Compressor()
    layer = dataclasses.replace(compressor.given["layer"])
    compressor.run(plan)
    compressor.run(plan, layer=layer, state=other.engine.state, cache=other.engine.cache)
    assert len(plan.prepared) == 1
    assert torch.equal(other.engine.cache, compressor.engine.cache)
    assert not torch.equal(other.engine.cache, Compressor().engine.cache)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kv_score", _apart),
        ("kv_score", _off_16_bytes),
        ("kv_score", lambda x: x.bfloat16()),
        ("state", _apart),
        ("cache", _off_16_bytes),
        ("layer", lambda x: dataclasses.replace(x, norm_weight=x.norm_weight.bfloat16())),
        ("layer", lambda x: dataclasses.replace(x, norm_weight=_off_16_bytes(x.norm_weight))),
    ],
)
def test_another_layout_is_prepared_anew(
    compressor: Compressor, name: str, change: Callable[[Any], Any]
) -> None:
    compressor.run(compressor.plan)
    compressor.run(compressor.plan, **{name: change(compressor.given[name])})
    assert len(compressor.plan.prepared) == 2


def test_a_weight_that_is_replaced_is_read(compressor: Compressor) -> None:
    """As an engine does that loads weights anew."""
    weight = compressor.given["layer"].norm_weight
    compressor.run(compressor.plan)
    before = compressor.given["cache"].clone()
    weight.data = 2 * weight
    compressor.run(compressor.plan)
    assert not torch.equal(compressor.given["cache"], before)


def test_another_plan_prepares_anew_and_checks_no_more(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[object] = []
    check = CompressorCall.paths
    monkeypatch.setattr(
        CompressorCall, "paths", lambda self, *args: checked.append(0) or check(self, *args)
    )
    for _ in range(2):
        plan = dataclasses.replace(compressor.plan)
        compressor.run(plan)
        assert len(plan.prepared) == 1
    assert len(checked) <= 1


def test_the_number_of_rows_is_checked_in_every_call(compressor: Compressor) -> None:
    plan = compressor.engine.decode_plan([(0, 8), None])
    rows = torch.cat([compressor.given["kv_score"]] * 2)
    compressor.run(plan, kv_score=rows)
    with pytest.raises(ValueError, match="kv_score must have at least 2 rows"):
        compressor.run(plan, kv_score=rows[:1])


def test_a_plan_and_a_calls_tensors_end_with_their_owners(compressor: Compressor) -> None:
    """At once, without waiting for Python to look for circles: they are a GPU's memory."""
    plan = compressor.plan
    compressor.run(plan)
    held = weakref.ref(compressor.engine.state), weakref.ref(compressor.engine.cache)
    of_plan = weakref.ref(plan.slots)
    gc.disable()
    try:
        compressor.given.clear()
        del compressor.engine
        assert [x() for x in held] == [None, None]
        del compressor.plan, plan
        assert of_plan() is None
    finally:
        gc.enable()


def test_a_plan_of_another_kind_is_checked(compressor: Compressor) -> None:
    spec = kit.make_spec(2)
    engine, layer = kit.V41Engine(spec, 2, 8), kit.make_layer(spec, 3, CPU)
    call, plan = engine.call(layer, kit.make_history(spec, 8, 1)), engine.plan([(0, 0, 8)], 0)
    tensors = (call.layer, call.kv_score, call.state, call.cache, call.index_cache)
    compress_v41_(*tensors, plan, target=TARGET)
    without = V41Step(plan.positions, plan.slots, plan.index_slots)
    with pytest.raises(ValueError, match=re.escape("state_slots must be given for ratio 2")):
        compress_v41_(*tensors, without, target=TARGET)


def test_a_plan_forgets_all_layouts_before_they_are_too_many() -> None:
    kept = Prepared()
    for layout in range(1000):
        kept.keep(layout, object())
    assert 0 < len(kept) <= 256
