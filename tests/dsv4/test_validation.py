"""Wrong calls raise before anything is written, and say what was expected and what came."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable

import pytest
import torch

import dsv4_backend as dsv4
from dsv4_backend.compressor import decode as decode_pipeline
from dsv4_backend.compressor.bound import CompressorCall
from dsv4_backend.launch_params import DecodeC4Params
from dsv4_backend.selection import select_paths
from dsv4_backend.step_plan import DecodeStepPlan
from tests.dsv4.cases import DEVICE, TARGET, Engine, make_history, make_layer, make_spec, rope_table

KV = torch.randn(4, 128, device=DEVICE)
WEIGHT = torch.ones(128, device=DEVICE)
TABLE = rope_table()
PLAN = dsv4.SeqLens(torch.tensor([4, 8, 12, 16], device=DEVICE))


def in_place(**changes: object) -> None:
    args: dict[str, object] = {
        "kv": KV, "weight": WEIGHT, "eps": 1e-6, "freqs_cis": TABLE, "step_plan": PLAN,
        "head_dim": 128, "compress_ratio": 4, "rotate": True, "target": TARGET,
    }  # fmt: skip
    dsv4.compress_norm_rope_hadamard_(**(args | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv": KV[0]}, r"kv must have shape \[rows, 128\], got \[128\]"),
        ({"head_dim": 512}, r"kv must have shape \[rows, 512\], got \[4, 128\]"),
        ({"head_dim": 256}, "head_dim must be 128 or 512, got 256"),
        ({"compress_ratio": 2}, "compress_ratio must be 4 or 128, got 2"),
        ({"rotate": 1}, "rotate must be a bool, got 1"),
        ({"eps": 0.0}, "eps must be positive, got 0.0"),
        ({"kv": KV.half()}, "kv must have dtype float32 or bfloat16, got float16"),
        ({"kv": KV.repeat(1, 2)[:, ::2]}, "kv must have stride 1 in dimension 1, got 2"),
        ({"weight": WEIGHT[:64]}, r"weight must have shape \[128\], got \[64\]"),
        ({"freqs_cis": TABLE[:, :32]}, r"freqs_cis must have shape \[positions, 64\], got"),
        ({"step_plan": PLAN.seq_lens}, "step_plan must be a SeqLens, got Tensor"),
        ({"kv": KV[:3]}, r"seq_lens must have at most 3 entries \(rows of kv\), got 4"),
    ],
)
def test_in_place(changes: dict[str, object], message: str) -> None:
    before = KV.clone()
    with pytest.raises(ValueError, match=message):
        in_place(**changes)
    assert torch.equal(KV, before)


def test_unknown_arguments_raise() -> None:
    with pytest.raises(TypeError):
        in_place(rounding="vllm")


SPEC = make_spec("indexer_fp8")
LAYER = make_layer(SPEC)
ENGINE = Engine("ring", SPEC, [8])
DECODE = ENGINE.decode_plan([(0, 8)])
ROW = make_history(SPEC, 1, 0)


def decode(**changes: object) -> None:
    args: dict[str, object] = {
        "layer": LAYER, "kv_score": ROW, "state": ENGINE.state, "cache": ENGINE.cache,
        "step_plan": DECODE, "target": TARGET,
    }  # fmt: skip
    dsv4.compress_decode_(**(args | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_score": ROW[:, :256]}, r"kv_score must have shape \[T, 512\], got \[1, 256\]"),
        ({"kv_score": ROW[:0]}, r"kv_score must have at least 1 rows .* got 0"),
        ({"kv_score": ROW.double()}, "kv_score must have dtype float32 or bfloat16, got float64"),
        ({"state": ENGINE.state[:, :3]}, r"state must have shape \[pages, 4, 512\], got"),
        ({"cache": ENGINE.cache.view(torch.int8)}, "cache must have dtype uint8, got int8"),
        ({"cache": ENGINE.cache[:, :527]}, "cache must have pages of at least 528 bytes .*got 527"),
        ({"cache": torch.zeros(2, 530, dtype=torch.uint8, device=DEVICE)}, "aligned to 4 bytes"),
        ({"step_plan": PLAN}, "step_plan must be a DecodeStepPlan, got SeqLens"),
        (
            {"step_plan": ENGINE.prefill_plan([(0, 0, 4)])},
            "step_plan must be a DecodeStepPlan, got RingPrefill",
        ),
        (
            {"selection": select_paths(TARGET, "main_c4_decode")},
            "selection must be of indexer_decode, got one of main_c4_decode",
        ),
    ],
)
def test_decode(changes: dict[str, object], message: str) -> None:
    before = ENGINE.cache.clone()
    with pytest.raises(ValueError, match=message):
        decode(**changes)
    assert torch.equal(ENGINE.cache, before)


def test_prefill_refuses_a_decode_plan() -> None:
    with pytest.raises(ValueError, match="step_plan must be a PrefillStepPlan, got RingDecode"):
        dsv4.compress_prefill_(LAYER, ROW, ENGINE.state, ENGINE.cache, DECODE, target=TARGET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 64}, "head_dim must be 128 or 512, got 64"),
        ({"head_dim": 512}, "cache_format indexer_fp8 must have head_dim 128, got 512"),
        ({"compress_ratio": 128}, "head_dim 128 must have compress_ratio 4, got 128"),
        ({"cache_format": "fp8"}, "cache_format must be fp8_ds_mla or .* got 'fp8'"),
        ({"rounding": "fp32"}, "rounding must be sglang or vllm or aiter, got 'fp32'"),
        ({"fp8": "e4m3"}, "fp8 must be ocp or fnuz, got 'e4m3'"),
        ({"rope_layout": "neox"}, "rope_layout must be interleaved or split, got 'neox'"),
        ({"page_tokens": 0}, "page_tokens must be positive, got 0"),
    ],
)
def test_spec(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]


def test_rotation_goes_with_the_indexer() -> None:
    with pytest.raises(ValueError, match="rotate must go with head_dim 128, got 512"):
        make_spec("fp8_ds_mla", rotate=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ape": LAYER.ape[:, :1]}, r"ape must have shape \[4, 2, 128\], got \[4, 1, 128\]"),
        ({"norm_weight": WEIGHT[:1]}, r"norm_weight must have shape \[128\], got \[1\]"),
        ({"rope_table": TABLE.double()}, "rope_table must have dtype float32 or bfloat16, got"),
    ],
)
def test_layer(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LAYER, **changes)  # type: ignore[arg-type]


def _i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: dsv4.SeqLens(_i32(3).float()), "seq_lens must have dtype int32 or int64, got"),
        (lambda: dsv4.RingDecode(_i32(3, 4), _i32(2)), r"slots must have shape \[3\], got \[2\]"),
        (lambda: dsv4.RingPrefill(_i32(3, 4), _i32(2, 4), _i32(3)), r"writes must have .*\[N, 2\]"),
        (
            lambda: dsv4.PagedDecode(_i32(3), _i32(2), _i32(3), _i32(1, 2), _i32(3)),
            r"state_slots must have shape \[3\], got \[2\]",
        ),
        (
            lambda: dsv4.PagedDecode(_i32(3), _i32(3), _i32(3), _i32(1, 2).long(), _i32(3)),
            "block_table must have dtype int32, got int64",
        ),
    ],
)
def test_plans(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_prefetch_needs_pdl() -> None:
    params = DecodeC4Params(num_warps=1, block_w=8, pdl="wait", prefetch="pool")
    with pytest.raises(ValueError, match="prefetch must be none where pdl is off, got 'pool'"):
        dataclasses.replace(params, pdl="off")


def test_a_target_without_a_table_is_named() -> None:
    from backend_core.target import Target

    with pytest.raises(LookupError, match="no dsv4 kernel paths for sm75"):
        decode(target=Target("nvidia", "sm75", 40, "T4"))


def test_a_launch_cache_keeps_what_calls_that_agree_need() -> None:
    """Another cache, state or weight at another address is checked and packed anew."""
    engine = Engine("ring", LAYER.spec, [8])
    layer, kv_score = make_layer(LAYER.spec), torch.zeros(1, LAYER.spec.row_width, device=DEVICE)
    step_plan, launches = engine.decode_plan([(0, 8)]), dsv4.LaunchCache()

    def found(state: torch.Tensor, cache: torch.Tensor, step_plan: DecodeStepPlan) -> object:
        call = CompressorCall(layer, kv_score, state, cache)
        return launches.find(decode_pipeline.bind, call, step_plan, TARGET, None)

    first = found(engine.state, engine.cache, step_plan)
    assert found(engine.state, engine.cache, engine.decode_plan([(0, 8)])) is first
    assert found(engine.state, engine.cache.clone(), step_plan) is not first
    assert found(engine.state.clone(), engine.cache, step_plan) is not first
    assert found(engine.state, engine.cache, engine.decode_plan([(0, 8)], True)) is not first
    with pytest.raises(ValueError, match="kv_score must have at least 2 rows"):
        found(engine.state, engine.cache, engine.decode_plan([(0, 8), None]))
    layer.norm_weight.data = layer.norm_weight.clone()
    assert found(engine.state, engine.cache, step_plan) is not first


def test_a_launch_cache_keeps_no_engine_memory_alive() -> None:
    engine, launches = Engine("ring", LAYER.spec, [8]), dsv4.LaunchCache()
    engine.fill_state(LAYER, 0, make_history(LAYER.spec, 7, 0))
    caches = weakref.ref(engine.state), weakref.ref(engine.cache)
    step_plan = engine.decode_plan([(0, 8)])
    dsv4.compress_decode_(
        LAYER, ROW, engine.state, engine.cache, step_plan, target=TARGET, launches=launches
    )
    del engine
    gc.collect()
    assert [cache() for cache in caches] == [None, None]
