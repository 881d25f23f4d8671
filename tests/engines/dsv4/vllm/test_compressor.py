"""vLLM's compressor through its own call: state, records, plans, and what stays upstream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.models.deepseek_v4.compressor import (
    CompressorMetadataBuilder,
    CompressorStateCache,
    DeepseekCompressor,
)

from backend_core.engines import entry, vllm_flag
from backend_core.strict import FallbackError
from backend_core.target import Target
from dsv4_backend import PagedDecode, PagedPrefill, reference
from dsv4_backend.engines import vllm_compressor
from dsv4_backend.engines.vllm_compressor import FusedCompressor, StateCache
from tests.dsv4.cases import assert_records, expected_rows, make_history
from tests.engines.deepseek_v4 import STEPS_C128
from tests.engines.dsv4.vllm.harness import Step, build, engine_config, on_kernels_of, rotary
from tests.engines.vllm_process import forward_pass

entry.vllm.dsv4()

# prompts cut inside windows beside decodes, single tokens, and a request that comes later
STEPS_C4 = [
    [(0, 0, 7), (1, 0, 5)],
    [(0, 7, 8), (1, 5, 14)],
    [(0, 8, 9), (1, 14, 15), (2, 0, 3)],
    [(1, 15, 16), (2, 3, 4), (0, 9, 10)],
    [(0, 10, 11), (1, 16, 17), (2, 4, 5)],
    [(0, 11, 12), (2, 5, 8)],
]


def serve(step: Step, steps: list[list[tuple[int, int, int]]], config: Any) -> list[torch.Tensor]:
    lengths = step.caches.lengths
    histories = [make_history(step.layer.spec, n, seed) for seed, n in enumerate(lengths)]
    for chunks in steps:
        step.run(config, histories, chunks)
    return histories


def check(step: Step, histories: list[torch.Tensor]) -> None:
    """State rows are exact, records are the definition's, and nothing else was written."""
    engine, layer = step.caches, step.layer
    state = torch.full_like(engine.state, torch.nan)
    want = {}
    for request, history in enumerate(histories):
        for position, row in enumerate(history):
            page, place = engine.locate(request, position)
            state[page, place] = engine.expected_row(layer, row, position)
        rows = expected_rows(layer, history)
        for window, row in enumerate(rows):
            want[engine.slot(request, (window + 1) * layer.spec.compress_ratio)] = row
    torch.testing.assert_close(engine.state, state, rtol=0, atol=0, equal_nan=True)
    assert_records(engine, layer, want)


@pytest.mark.parametrize(
    ("cache_format", "ratio"),
    [
        ("fp8_ds_mla", 4),
        ("fp8_ds_mla", 128),
        ("bf16_rows", 4),
        ("indexer_fp8", 4),
        ("indexer_mxfp4", 4),
    ],
)
def test_the_engines_steps_give_the_definitions_state_and_records(
    cache_format: str, ratio: int
) -> None:
    config = engine_config(flag=True)
    ours = build(config, cache_format, ratio)
    assert type(ours) is FusedCompressor and type(ours.state_cache) is StateCache
    step = Step(ours, cache_format, [12, 17, 8] if ratio == 4 else [257, 129])
    check(step, serve(step, STEPS_C4 if ratio == 4 else STEPS_C128, config))


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_a_batch_may_be_padded_in_its_slots_alone(padding: int, flag: bool) -> None:
    """As Model Runner V2 pads batches outside of FULL graphs: prefills, mixed ones and decodes."""
    config = engine_config(flag=flag)
    step = Step(build(config, "indexer_fp8"), "indexer_fp8", [12, 17, 8])
    histories = [make_history(step.layer.spec, n, seed) for seed, n in enumerate([12, 17, 8])]
    for chunks in STEPS_C4:
        metadata = step.run(config, histories, chunks, padding, pads_requests=False)
        tokens = sum(end - start for _, start, end in chunks)
        assert metadata.slot_mapping.shape[0] == tokens + padding
        assert metadata.token_to_req_indices.shape[0] == tokens
    if flag:
        check(step, histories)


def test_a_batch_of_padding_alone_writes_nothing() -> None:
    config = engine_config(flag=True)
    step = Step(build(config, "indexer_fp8"), "indexer_fp8", [12])
    history = make_history(step.layer.spec, 12, 0)
    step.run(config, [history], [(0, 0, 7)])
    before = step.caches.state.clone(), step.caches.cache.clone()
    step.run(config, [history], [(0, 7, 7)], padding=3, pads_requests=False)
    assert torch.equal(step.caches.state.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(step.caches.cache, before[1])


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "indexer_mxfp4"])
def test_the_gpus_kernels_give_the_same_through_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, cache_format: str
) -> None:
    on_kernels_of(monkeypatch, "H200")
    config = engine_config(flag=True)
    step = Step(build(config, cache_format), cache_format, [12, 17, 8])
    check(step, serve(step, STEPS_C4, config))


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "indexer_fp8"])
def test_stock_writes_the_same_state_and_records(cache_format: str) -> None:
    """Beside vLLM's own Triton kernels in the interpreter.

    It truncates to bf16 and e4m3, and loses the carry of a mantissa that rounds up to 2: codes may
    be one or, where ours is a power of two, eight apart. It cannot run the mxfp4 kernel's PTX.
    """
    results = []
    for flag in (True, False):
        config = engine_config(flag=flag)
        step = Step(build(config, cache_format), cache_format, [12, 17, 8])
        serve(step, STEPS_C4, config)
        results.append(step.caches)
    ours, upstream = results
    assert torch.equal(ours.state.nan_to_num(7), upstream.state.nan_to_num(7))
    slots = ours.slot_of.flatten()
    width = 448 if cache_format == "fp8_ds_mla" else 128
    (data, scales), (stock_data, stock_scales) = (
        reference.load(engine.caches, slots, ours.spec) for engine in results
    )
    assert torch.equal(scales, stock_scales)
    codes, stock_codes = (x[:, :width].int() for x in (data, stock_data))
    apart = (codes - stock_codes).abs()
    assert ((apart <= 1) | ((apart == 8) & (codes % 8 == 0))).all()
    tail, stock_tail = (
        x[:, width:].contiguous().view(torch.bfloat16).float() for x in (data, stock_data)
    )
    torch.testing.assert_close(tail, stock_tail, rtol=2**-7, atol=0)
    outside = [engine.cache.clone() for engine in results]
    for cache in outside:
        poison = torch.zeros(len(slots), data.shape[1] + scales.shape[1], dtype=torch.uint8)
        reference.store(
            [cache], slots, ours.spec, poison[:, : data.shape[1]], poison[:, data.shape[1] :],
        )  # fmt: skip
    assert torch.equal(*outside)


def test_a_step_is_one_call_and_its_plan_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    for name in ("compress_decode_", "compress_prefill_"):
        monkeypatch.setattr(vllm_compressor, name, lambda *args, **_: calls.append(args))
    config = engine_config(flag=True)
    step = Step(build(config, "indexer_fp8"), "indexer_fp8", [12, 17, 8])
    histories = [make_history(step.layer.spec, n, n) for n in (12, 17, 8)]
    prefill = step.run(config, histories, [(0, 0, 7), (1, 0, 1)])
    decode = step.run(config, histories, [(0, 7, 8), (1, 1, 2)])
    assert [type(call[-1]) for call in calls] == [PagedPrefill, PagedDecode]
    for metadata, call in ((prefill, calls[0]), (decode, calls[1])):
        ((plan, records),) = metadata.plans.values()
        assert plan is call[-1]
        again = vllm_compressor._plan(step.compressor, metadata, records, plan.positions)
        assert again is plan
    main = build(config, "fp8_ds_mla")
    other = vllm_compressor._plan(main, decode, records, plan.positions)
    assert other is not plan  # of another stream


def test_the_profile_run_does_nothing() -> None:
    config = engine_config(flag=True)
    ours = build(config, "indexer_fp8")
    with forward_pass(config, None, 3):
        ours(torch.zeros(3, 512), torch.zeros(3, dtype=torch.int64), rotary(4))
    assert ours._bound is None


def test_without_the_flag_a_compressor_is_stocks() -> None:
    upstream = build(engine_config(flag=False), "fp8_ds_mla")
    assert (
        type(upstream) is DeepseekCompressor and type(upstream.state_cache) is CompressorStateCache
    )
    assert upstream.state_cache.get_attn_backend().get_builder_cls() is CompressorMetadataBuilder


class OfAPlatform(DeepseekCompressor):
    pass


def refused(monkeypatch: pytest.MonkeyPatch, case: str) -> Any:
    config = engine_config(flag=True)
    if case == "subclass":
        return build(config, "indexer_fp8", cls=OfAPlatform)
    if case == "fp8 rows":
        return build(config, "fp8_rows", cache_dtype="fp8")
    if case == "batch invariance":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    elif case == "scales":
        monkeypatch.setattr(vllm_compressor, "_packs_scales", lambda: True)
    elif case == "no table":
        turing = Target("nvidia", "sm75", 40, "T4")
        monkeypatch.setattr(vllm_compressor, "detect_target", lambda device: turing)
        vllm_compressor._choose.cache_clear()
    elif case == "broken":
        monkeypatch.setattr(vllm_flag._families["dsv4"], "broken", "it broke")
    return build(config, "indexer_fp8")


REFUSALS = {
    "subclass": ".OfAPlatform is a compressor that is not replaced",
    "fp8 rows": "main records of kv_cache_dtype fp8 are not served: fp8_ds_mla and bf16 are",
    "batch invariance": "VLLM_BATCH_INVARIANT is set",
    "scales": "on Blackwell vllm keeps the indexer's fp8 scales as four bytes, not as fp32",
    "no table": "no dsv4 kernel paths for sm75",
    "broken": "it broke",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_served_stays_upstreams_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str], case: str
) -> None:
    for _ in range(2):
        upstream = refused(monkeypatch, case)
        assert type(upstream) in (DeepseekCompressor, OfAPlatform)
        assert type(upstream.state_cache) is CompressorStateCache
    lines = [line for line in log_lines if "falling back to upstream's code" in line]
    assert len(lines) == 1 and REFUSALS[case] in lines[0]
    assert f"--attention-backend {vllm_flag.flag_name('dsv4')}: " in lines[0]
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="KDA_DSV4_STRICT forbids"):
        refused(monkeypatch, case)


def test_a_failing_step_is_logged_once_and_raised(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """vLLM then ends the engine: no request gets an answer from half a step."""
    config = engine_config(flag=True)
    step = Step(build(config, "indexer_fp8"), "indexer_fp8", [12])
    history = make_history(step.layer.spec, 12, 0)
    step.run(config, [history], [(0, 0, 4)])

    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("no such page")

    monkeypatch.setattr(vllm_compressor, "compress_prefill_", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such page"):
            step.run(config, [history], [(0, 4, 7)])
    lines = [line for line in log_lines if "no such page" in line]
    assert len(lines) == 1
    assert lines[0].startswith("kda-dsv4-backend: the step of compressor layer.compressor.state_c")
    assert "vllm will end this engine and its requests: ValueError: no such page" in lines[0]


def test_caches_that_cannot_be_served_go_to_stock_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    config = engine_config(flag=True)
    step = Step(build(config, "indexer_fp8"), "indexer_fp8", [12])
    history = make_history(step.layer.spec, 12, 0)
    calls: list[Any] = []
    monkeypatch.setattr(DeepseekCompressor, "forward", lambda self, *args: calls.append(args))
    cache = step.compressor._static_forward_context["layer"]
    cache.kv_cache = cache.kv_cache[:, :, 1:]  # no longer at a multiple of 4 bytes
    step.run(config, [history], [(0, 0, 7)])
    assert len(calls) == 1 and type(step.compressor) is DeepseekCompressor
    assert step.caches.state.isnan().all()
    assert any("cache must have pages aligned to 4 bytes" in line for line in log_lines)


def test_what_was_chosen_is_said_once_for_each_kind(log_lines: list[str]) -> None:
    vllm_compressor._choose.cache_clear()
    config = engine_config(flag=True)
    for _ in range(2):
        build(config, "fp8_ds_mla", 128)
    lines = [line for line in log_lines if "DeepSeek-V4's compressors" in line]
    assert lines == [
        "kda-dsv4-backend: DeepSeek-V4's compressors of 512 channels and ratio 128"
        " (fp8_ds_mla) on cpu (cpu): decode torch; prefill torch"
    ]
