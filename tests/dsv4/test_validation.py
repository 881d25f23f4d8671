"""Wrong calls raise before anything is written, and say what was expected and what came."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import dsv4_backend as dsv4
from dsv4_backend import compressor, validation
from dsv4_backend.step_plan import DecodePlan
from tests.dsv4.cases import DEVICE, TARGET, Engine, make_history, make_layer, make_spec, rope_table

KV = torch.randn(4, 128, device=DEVICE)
WEIGHT = torch.ones(128, device=DEVICE)
TABLE = rope_table()
PLAN = dsv4.SeqLens(torch.tensor([4, 8, 12, 16], device=DEVICE))


def in_place(**changes: object) -> None:
    args: dict[str, object] = {
        "kv": KV, "weight": WEIGHT, "eps": 1e-6, "freqs_cis": TABLE, "plan": PLAN,
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
        ({"plan": PLAN.seq_lens}, "plan must be SeqLens or RowPlan, got Tensor"),
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
        "plan": DECODE, "target": TARGET,
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
        ({"plan": PLAN}, "plan must be a decode plan of metadata, got SeqLens"),
        ({"plan": ENGINE.prefill_plan([(0, 0, 4)])}, "must be a decode plan .* got RingPrefill"),
    ],
)
def test_decode(changes: dict[str, object], message: str) -> None:
    before = ENGINE.cache.clone()
    with pytest.raises(ValueError, match=message):
        decode(**changes)
    assert torch.equal(ENGINE.cache, before)


def test_prefill_refuses_a_decode_plan() -> None:
    with pytest.raises(ValueError, match=r"must be a prefill plan .* got RingDecode"):
        dsv4.compress_prefill_(LAYER, ROW, ENGINE.state, ENGINE.cache, DECODE, target=TARGET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 64}, "head_dim must be 128 or 512, got 64"),
        ({"head_dim": 512}, "cache_format indexer_fp8 must have head_dim 128, got 512"),
        ({"compress_ratio": 128}, "head_dim 128 must have compress_ratio 4, got 128"),
        ({"cache_format": "fp8"}, "cache_format must be fp8_ds_mla or .* got 'fp8'"),
        ({"rounding": "fp32"}, "rounding must be official or sglang or vllm, got 'fp32'"),
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
        (lambda: dsv4.RowPlan(_i32(3, 3)), r"rows must have shape \[N, 4\], got \[3, 3\]"),
        (lambda: dsv4.RowPlan(_i32(3, 3).view(torch.uint8)), r"rows must have shape \[N, 16\]"),
        (lambda: dsv4.RingDecode(_i32(3, 4), _i32(2)), r"slots must have shape \[3\], got \[2\]"),
        (lambda: dsv4.RingDecodeV1(_i32(3), _i32(2), _i32(3)), r"pages must have shape \[3\]"),
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


def test_pairs_share_what_one_launch_shares() -> None:
    main = make_layer(make_spec("fp8_ds_mla"))
    engine = Engine("ring", main.spec, [8])
    plan = engine.decode_plan([(0, 8)])
    with pytest.raises(ValueError, match="rope_table of a pair must be one tensor, got two"):
        validation.check_pair(main, LAYER)
    with pytest.raises(ValueError, match=r"a pair must have head_dim 512 .* got 128 and 512"):
        validation.check_pair(LAYER, main)
    other = make_layer(make_spec("indexer_fp8", rounding="sglang"))
    with pytest.raises(ValueError, match="rounding of a pair must be the same, got 'vllm'"):
        validation.check_pair(main, other)
    paged = Engine("paged", SPEC, [8]).decode_plan([(0, 8)])
    with pytest.raises(ValueError, match="plan of a pair must be the same, got 'RingDecode'"):
        validation.check_pair_plans(plan, paged)


def test_a_target_without_a_table_is_named() -> None:
    from backend_core.target import Target

    with pytest.raises(LookupError, match="no dsv4 kernel paths for sm75"):
        decode(target=Target("nvidia", "sm75", 40, "T4"))


def test_what_was_found_right_is_kept_for_calls_that_agree() -> None:
    """Another cache, state or weight at another address is checked and packed anew."""
    engine = Engine("ring", LAYER.spec, [8])
    layer, kv_score = make_layer(LAYER.spec), torch.zeros(1, LAYER.spec.row_width, device=DEVICE)
    plan = engine.decode_plan([(0, 8)])

    def found(state: torch.Tensor, cache: torch.Tensor, plan: DecodePlan) -> object:
        return compressor.ready((layer, kv_score, state, cache), plan, "decode", TARGET)

    first = found(engine.state, engine.cache, plan)
    assert found(engine.state, engine.cache, engine.decode_plan([(0, 8)])) is first
    assert found(engine.state, engine.cache.clone(), plan) is not first
    assert found(engine.state.clone(), engine.cache, plan) is not first
    assert found(engine.state, engine.cache, engine.decode_plan([(0, 8)], True)) is not first
    with pytest.raises(ValueError, match="kv_score must have at least 2 rows"):
        found(engine.state, engine.cache, engine.decode_plan([(0, 8), None]))
    layer.norm_weight.data = layer.norm_weight.clone()
    assert found(engine.state, engine.cache, plan) is not first
