"""sglang's compressors through sglang's own call: state, records, and what stays upstream's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.dsv4 import CompressorDecodePlan, CompressorPrefillPlan
from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin

from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from dsv4_backend import RingDecode
from dsv4_backend.engines import sglang_compressor
from dsv4_backend.engines.sglang_compressor import FusedStep
from dsv4_backend.selection import decode_selection, prefill_selection
from tests.dsv4.cases import assert_records, expected_rows, make_history
from tests.engines.deepseek_v4 import STEPS_C128
from tests.engines.dsv4.sglang.harness import STEP, Backend, Served, real_pool

# prompts cut inside windows, decodes beside them, and single tokens
STEPS_C4 = [
    [(0, 0, 7), (1, 0, 5)],
    [(0, 7, 8), (1, 5, 14)],
    [(0, 8, 9), (1, 14, 15)],
    [(1, 15, 16), (0, 9, 10)],
    [(0, 10, 11), (1, 16, 17)],
    [(0, 11, 12)],
]


@pytest.fixture
def no_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    def upstream(self: Any, **call: Any) -> None:
        raise AssertionError("upstream's step was called")

    monkeypatch.setattr(CompressorBackendMixin, STEP, upstream)
    monkeypatch.setattr(sglang_compressor, "_refusal", lambda kind: None)


@pytest.mark.parametrize(
    ("cache_format", "ratio"),
    [("indexer_fp8", 4), ("indexer_mxfp4", 4), ("fp8_ds_mla", 4), ("fp8_ds_mla", 128)],
)
def test_records_are_the_definitions(no_stock: None, cache_format: str, ratio: int) -> None:
    check_steps(Served(cache_format, ratio, [33, 30] if ratio == 4 else [257, 129]))


@pytest.mark.parametrize(
    ("cache_format", "ratio", "page_tokens"),
    [("indexer_fp8", 4, 64), ("fp8_ds_mla", 4, 64), ("fp8_ds_mla", 128, 2)],
)
def test_the_pool_that_sglang_allocates(
    no_stock: None, cache_format: str, ratio: int, page_tokens: int
) -> None:
    """Its pages, its paddings and its flat states."""
    lengths = [33, 30] if ratio == 4 else [257, 129]
    served = Served(cache_format, ratio, lengths, page_tokens=page_tokens)
    served.use(real_pool())
    check_steps(served)


def check_steps(served: Served) -> None:
    """State rows are exact, records are the definition's, and nothing else was written."""
    engine, layer, ratio = served.engine, served.layer, served.engine.spec.compress_ratio
    steps = STEPS_C4 if ratio == 4 else STEPS_C128
    lengths = [max(end for chunks in steps for r, _, end in chunks if r == n) for n in (0, 1)]
    histories = [make_history(layer.spec, n, seed) for seed, n in enumerate(lengths)]
    for chunks in steps:
        served.run(histories, chunks)
    want = {}
    for request, history in enumerate(histories):
        for window, row in enumerate(expected_rows(layer, history)):
            want[engine.slot(request, (window + 1) * ratio)] = row
        page, row = engine.locate(request, len(history) - 1)
        assert torch.equal(engine.state[page, row], history[-1].to(engine.state.dtype))
    assert_records(engine, layer, want)


@pytest.mark.parametrize(
    ("cache_format", "ratio"), [("indexer_fp8", 4), ("fp8_ds_mla", 4), ("fp8_ds_mla", 128)]
)
def test_a_first_prompt_that_ends_no_window(no_stock: None, cache_format: str, ratio: int) -> None:
    """Without CUDA graphs sglang's first step may be such a prompt; its plan has no entry then."""
    length = 2 * ratio + 3
    served = Served(cache_format, ratio, [length])
    history = make_history(served.layer.spec, length, 0)
    for chunk in ((0, ratio - 2), (ratio - 2, ratio - 1), (ratio - 1, ratio), (ratio, length)):
        served.run([history], [(0, *chunk)], padding=0)
    rows = expected_rows(served.layer, history)
    want = {served.engine.slot(0, (n + 1) * ratio): row for n, row in enumerate(rows)}
    assert_records(served.engine, served.layer, want)


def test_a_first_micro_batch_without_tokens(no_stock: None) -> None:
    """sglang gives such a one an empty plan on HIP."""
    served = Served("fp8_ds_mla", 128, [129])
    engine, history = served.engine, make_history(served.layer.spec, 129, 0)
    entries = torch.empty(0, 16, dtype=torch.uint8)
    slots = SimpleNamespace(c128_out_loc=torch.empty(0, dtype=torch.int64))
    served.backend.forward_metadata = SimpleNamespace(
        core_metadata=slots,
        c128_compress_metadata=CompressorPrefillPlan(128, entries, entries[:, :8].contiguous()),
    )
    step = getattr(served.backend, STEP)
    step(**call_of(served, served.compressor, history[:0], slots.c128_out_loc))
    served.run([history], [(0, 0, 129)])
    assert_records(
        engine, served.layer, {engine.slot(0, 128): expected_rows(served.layer, history)[0]}
    )


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_slots_that_a_layer_translates_are_not_read_early(
    no_stock: None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiSparse's pool writes the main records' slots in front of each step, where a kernel that
    reads them before its PDL wait would race; elsewhere they are the step's own."""
    compiled: list[Any] = []
    monkeypatch.setattr(
        sglang_compressor, "warm_up", lambda *tensors, **kept: compiled.append(tensors[-1])
    )
    for translates in (False, True):
        served = Served("fp8_ds_mla")
        if translates:
            served.backend.token_to_kv_pool.layer_mapping = {0: (4, 0, HiSparse())}
        history = make_history(served.layer.spec, 4, 0)
        compiled.clear()
        served.run([history], [(0, 0, 1)] if first == "decode" else [(0, 0, 2)])
        served.run([history], [(0, 1, 2)])
        taken = getattr(served.backend, STEP)._plans[4, False][2]
        plans = [plan for plan in (*compiled, taken) if isinstance(plan, RingDecode)]
        assert len(plans) == 2
        assert [plan.pdl_prefetch_safe for plan in plans] == 2 * [not translates]


class HiSparse:
    """What sglang asks of HiSparse's pool; slots stay what they are."""

    def translate_loc_to_hisparse_device(self, loc: torch.Tensor) -> torch.Tensor:
        return loc.clone()

    _translate_loc_to_hisparse_device = translate_loc_to_hisparse_device


def test_main_records_in_bf16(no_stock: None) -> None:
    """sglang's unified pool: rows of bf16, a page each, which it says in the call."""
    served = Served("bf16_rows")
    compressor, engine = served.compressor, served.engine
    histories = [make_history(engine.spec, 8, 0)]
    plan = engine.prefill_plan([(0, 0, 8)])
    theirs = CompressorPrefillPlan(4, plan.windows.view(torch.uint8), plan.writes.view(torch.uint8))
    served.backend.forward_metadata = SimpleNamespace(
        c4_compress_metadata=theirs, core_metadata=SimpleNamespace(c4_out_loc=None)
    )
    getattr(served.backend, STEP)(
        **call_of(served, compressor, histories[0], plan.slots), bf16_store=True
    )
    rows = expected_rows(served.layer, histories[0])
    assert_records(engine, served.layer, {engine.slot(0, 4 * n + 4): rows[n] for n in (0, 1)})


def test_steps_that_the_table_leaves_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper prefills, and decodes of ratio 128 of more than 64 requests."""
    target, left = KNOWN_TARGETS["H200"], []

    def choose(device: torch.device, spec: Any) -> Any:
        ring = prefill_selection(target, spec, "ring", "sglang_jit")
        return decode_selection(target, spec, "sglang_jit"), ring

    monkeypatch.setattr(sglang_compressor, "_choose", choose)
    monkeypatch.setattr(
        CompressorBackendMixin, STEP, lambda self, **call: left.append(len(call["out_loc"]))
    )
    monkeypatch.setattr(sglang_compressor, "_refusal", lambda kind: None)
    served = Served("fp8_ds_mla", 128, [130, *65 * [2]])
    histories = [make_history(served.layer.spec, n, n) for n in (130, *65 * [2])]
    served.run(histories, [(0, 0, 128)])
    assert left == [128]
    served.run(histories, [(0, 128, 129)])
    assert left == [128]
    served.run(histories, [(r, 0, 1) for r in range(1, 66)])
    assert left == [128, 65]


def call_of(served: Served, compressor: Any, x: torch.Tensor, slots: torch.Tensor) -> dict:
    engine = served.engine
    return {
        "kv_score_buffer": engine.state,
        "kv_score_input": x,
        "ape": compressor.ape,
        "head_dim": engine.spec.head_dim,
        "norm": compressor.norm,
        "freqs_cis_cache": compressor.freqs_cis,
        "kv_cache": engine.cache,
        "is_indexer": engine.spec.head_dim == 128,
        "rotate": engine.spec.rotate,
        "compress_ratio": engine.spec.compress_ratio,
        "page_size": engine.spec.page_tokens,
        "out_loc": slots,
    }


def test_a_step_of_layers_shares_its_plan(no_stock: None) -> None:
    served = Served("indexer_fp8")
    step = getattr(served.backend, STEP)
    history = make_history(served.layer.spec, 2, 0)
    served.run([history], [(0, 0, 2)])
    kept = dict(step._plans)
    metadata = served.backend.forward_metadata
    served.backend.forward_unified(
        history, SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False)), 0,
        served.compressor,
    )  # fmt: skip
    assert step._plans[4, True][2] is kept[4, True][2]
    assert served.backend.forward_metadata is metadata
    served.run([history], [(0, 1, 2)])
    assert step._plans[4, True][2] is not kept[4, True][2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_layout": SimpleNamespace(name="V41")}, "DeepSeek-V4's layout, got V41"),
        ({"kv_scale_cache": torch.zeros(1, 64)}, "second_cache must be None for indexer_fp8"),
        (
            {"kv_scale_cache": torch.zeros(1, 64), "use_fp4_indexer": True},
            "page_tokens must be a multiple of 64 for indexer_mxfp4_planes, got 4",
        ),
        ({"kv_score_buffer": torch.zeros(4, 1, 384)}, "SGLANG_OPT_USE_ONLINE_COMPRESS keeps"),
        ({"kv_cache": torch.zeros(2, 100, dtype=torch.uint8)}, "cache must have pages of at least"),
    ],
)
def test_what_is_not_served_stays_upstreams(
    change: dict[str, Any],
    reason: str,
    log_lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served("indexer_fp8")
    calls: list[dict[str, Any]] = []
    backend = Backend(served.engine)
    plan = served.engine.decode_plan([(0, 4)])
    backend.forward_metadata = SimpleNamespace(
        c4_compress_metadata=CompressorDecodePlan(4, plan.entries.view(torch.uint8)),
        core_metadata=SimpleNamespace(c4_out_loc=plan.slots),
    )
    step = FusedStep(backend, lambda **call: calls.append(call))
    x = make_history(served.layer.spec, 1, 0)
    call = call_of(served, served.compressor, x, plan.slots) | change
    before = served.engine.cache.clone()
    step(**call)
    step(**call)
    assert calls == [call, call]
    assert torch.equal(served.engine.cache, before)
    assert len([line for line in log_lines if reason in line]) == 1
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match=reason):
        FusedStep(backend, lambda **call: None)(**call)


def test_a_pool_that_moves_is_bound_anew(no_stock: None) -> None:
    served = Served("indexer_fp8")
    history = make_history(served.layer.spec, 4, 0)
    served.run([history], [(0, 0, 4)])
    first, served.engine.cache = served.engine.cache, served.engine.cache.clone().fill_(0xA5)
    served.run([history], [(0, 0, 4)])
    assert torch.equal(first, served.engine.cache)


def test_a_backend_with_a_step_of_its_own_stays_upstreams(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, STEP, lambda self, **call: None, raising=False)
    served = Served("indexer_fp8")
    assert STEP not in vars(served.backend)
    assert "Backend has a step of its own, which is not replaced" in "\n".join(log_lines)


@pytest.mark.parametrize("planted", [False, True])
def test_the_gpu_script_sees_wrong_bytes(
    no_stock: None, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """`benchmarks.engines.dsv4_sglang_watch`, with this package's step in the place of sglang's."""
    from benchmarks.engines.dsv4_sglang_watch import RecordWatch

    ours = FusedStep.__call__
    monkeypatch.setattr(FusedStep, "__call__", ours)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    watch = RecordWatch()
    watch.watch_v4(sglang_compressor)
    served = Served("fp8_ds_mla", 4)
    step = getattr(served.backend, STEP)

    def upstream(**call: Any) -> None:
        rows = call["kv_score_input"]
        ours(step, **{**call, "kv_score_input": -rows if planted else rows})

    monkeypatch.setattr(step, "_upstream", upstream)
    histories = [make_history(served.layer.spec, n, seed) for seed, n in enumerate((33, 30))]
    served.run(histories, STEPS_C4[0])
    watch.comparing = True
    for chunks in STEPS_C4[1:]:
        served.run(histories, chunks)
    seen = watch.report()
    calls = {"prefill": {"ours": 2}, "decode": {"ours": 4}}
    assert seen["compressors"] == {"here": 1, "left": 0, "calls": calls}
    records = seen["records"]
    assert records["compared"] == {"prefill": 1, "decode": 4}
    assert records["planted_errors_seen"] == {"prefill": True, "decode": True}
    unlike = records["bytes_unlike_upstream"] / records["bytes_written"]
    assert unlike > 0.2 if planted else unlike == 0
