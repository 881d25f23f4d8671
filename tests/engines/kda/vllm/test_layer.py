"""The layer that vLLM builds: its class, its weights, its forward on real metadata, its cache."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from backend_core.strict import FallbackError
from backend_core.target import Target
from backend_core.testing.numerics import relative_error
from benchmarks.recall_vllm import transpose_states
from kda_backend import layer as operators
from kda_backend.engines import vllm_layer, vllm_profile
from tests.engines.kda.vllm.harness import (
    DRAFT,
    NGRAM,
    SLOTS,
    bind_cache,
    build_layer,
    check,
    engine_config,
    hidden,
    run_layer,
    step_metadata,
    table,
)
from tests.engines.kda.weights import Definition, checkpoint_weights, drawn

# bf16 layers differ from float64 by the roundings of their projections
TOLERANCE = 8e-3


@pytest.fixture
def config() -> Any:
    return engine_config(flag=True)


@pytest.fixture
def layer(config: Any) -> Any:
    built = build_layer(config)
    bind_cache(built, config)
    return built


def behind(x: torch.Tensor | None = None) -> Definition:
    """The checkpoint's layer after these tokens."""
    definition = Definition(checkpoint_weights(0))
    if x is not None:
        definition.run(x)
    return definition


def test_the_canary_leaves_transposed_states(
    layer: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `benchmarks.recall_vllm --only canary` plants into a server."""
    monkeypatch.setattr(operators, "prefill", operators.prefill)  # put back when the test ends
    transpose_states()
    metadata = step_metadata(layer, config, (40, 30), (0, 0), table(2, 9))
    run_layer(layer, config, hidden(70), metadata)
    for slot, begin, end in ((2, 0, 40), (9, 40, 70)):
        definition = behind(hidden(70)[begin:end])
        assert relative_error(layer.kv_cache[1][slot].mT, definition.state[0]) < TOLERANCE
        assert relative_error(layer.kv_cache[1][slot], definition.state[0]) > 0.5


def test_a_prompt_of_one_token_beside_a_prefill_starts_from_zero(layer: Any, config: Any) -> None:
    x = hidden(66)
    metadata = step_metadata(layer, config, (1, 65), (0, 0), table(6, 8))
    o = run_layer(layer, config, x, metadata)
    check(layer, o, x, (1, 65), (6, 8), [behind(), behind()], TOLERANCE)


@pytest.mark.parametrize("heads", [32, 5])
def test_other_numbers_of_heads(config: Any, heads: int) -> None:
    """Kimi-Linear-48B's heads; and a number that leaves rows of the packed weights to padding."""
    config.model_config.hf_config.linear_attn_config["num_heads"] = heads
    weights = drawn(heads)
    layer = build_layer(config, weights=weights)
    bind_cache(layer, config)
    definitions = [Definition(weights) for _ in range(2)]
    for lengths, done in (((20, 7), (0, 0)), ((1, 9), (20, 7)), ((1, 1), (21, 16))):
        x = hidden(sum(lengths), seed=sum(done))
        metadata = step_metadata(layer, config, lengths, done, table(3, 6))
        o = run_layer(layer, config, x, metadata)
        check(layer, o, x, lengths, (3, 6), definitions, TOLERANCE)


@pytest.mark.parametrize("apart", [False, True])
def test_slots_that_were_copied_just_before_are_not_fetched_early(
    layer: Any, config: Any, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """A column of a wider block table, as with drafts, is copied by the first layer of a step."""
    early = []
    step = operators.kda_decode_step

    def recorded(*values: Any, **options: Any) -> Any:
        early.append(options["pdl_prefetch_safe"])
        return step(*values, **options)

    monkeypatch.setattr(operators, "kda_decode_step", recorded)
    blocks = table(3, 7) if apart else table(3, 7)[:, :1].contiguous()
    metadata = step_metadata(layer, config, (1, 1), (30, 30), blocks)
    assert metadata.num_decodes == 2
    for _ in range(2):
        run_layer(layer, config, hidden(2), metadata)
    assert early == [not apart, True]


def test_a_second_engine_of_a_process_profiles_its_longer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They share a runtime, whose memory the first engine's profile run has not grown enough."""
    vllm_profile._warm.clear()
    tokens: list[int] = []
    seen = lambda *args: tokens.append(args[2].out.shape[0])  # noqa: E731
    monkeypatch.setattr(vllm_profile, "run_part", seen)
    runtimes = []
    for longest in (100, 60, 300):
        config = engine_config(flag=True)
        for index in range(2):
            layer = build_layer(config, index=index)
            runtimes.append(layer.kda_runtime)
            run_layer(layer, config, hidden(longest), None)
    assert len(set(runtimes)) == 1
    assert [n for n in tokens if n > 16] == [100, 300]


def test_both_layers_come_from_one_plan_that_is_logged_once(
    config: Any, log_lines: list[str]
) -> None:
    vllm_layer._runtime.cache_clear()
    build_layer(config)
    build_layer(config, index=1)
    assert log_lines[0].startswith("kda-dsv4-backend: KDA layers on cpu (cpu): 2 heads of 128")
    assert [line.split(": ")[1] for line in log_lines[1:]] == [
        "prefill grid 1 and more",
        "recurrent grid 1 and more",
        "decode_step grid 1 and more",
        "verify grid 1 and more",
        "verify_records grid 1 and more",
    ]


@pytest.fixture
def drafting() -> Any:
    return engine_config(flag=True, speculative_config=NGRAM)


def test_a_padded_draft_of_a_cuda_graph_touches_nothing(drafting: Any) -> None:
    layer = build_layer(drafting)
    bind_cache(layer, drafting)
    blocks = torch.tensor([[2, 3, 4, 5], [0, 0, 0, 0]], dtype=torch.int32)
    text = hidden(40)
    first = step_metadata(layer, drafting, (9,), (0,), blocks[:1], (0,))
    run_layer(layer, drafting, text[:9], first)
    before = [pool.clone() for pool in layer.kv_cache]
    metadata = step_metadata(layer, drafting, (DRAFT, 0), (9, 0), blocks, (1, 1))
    metadata.num_spec_decodes = 2  # as captured: sequences of no tokens at the null block
    metadata.spec_state_indices_tensor = blocks
    metadata.spec_query_start_loc = torch.tensor([0, DRAFT, DRAFT], dtype=torch.int32)
    metadata.num_accepted_tokens = torch.ones(2, dtype=torch.int32)
    o = run_layer(layer, drafting, text[9 : 9 + DRAFT + 3], metadata)
    assert relative_error(o[:DRAFT], behind(text[:9]).run(text[9 : 9 + DRAFT])) < TOLERANCE
    assert not o[DRAFT:].any()
    others = [slot for slot in range(SLOTS) if slot not in (2, 3, 4, 5)]
    for pool, kept in zip(layer.kv_cache, before, strict=True):
        assert torch.equal(pool[others], kept[others])


REFUSALS = {
    "a part without a table": "no kda kernel paths for sm75",
    "another convolution": "the short convolution must have 4 taps, got 3",
    "batch invariance": "VLLM_BATCH_INVARIANT is set, and the prefix cache keeps states",
    "stochastic rounding": "--enable-mamba-cache-stochastic-rounding is set, and KDA states",
    "wide heads": "KDA heads must have at most 128 channels, got 192",
}


def refuse(case: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "a part without a table":
        vllm_layer._runtime.cache_clear()
        old = Target("nvidia", "sm75", 40, "T4")
        monkeypatch.setattr(vllm_layer, "detect_target", lambda device: old)
    elif case == "batch invariance":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        config.cache_config.enable_prefix_caching = True
    elif case == "stochastic rounding":
        config.mamba_config.enable_stochastic_rounding = True
    elif case == "another convolution":
        config.model_config.hf_config.linear_attn_config["short_conv_kernel_size"] = 3
    else:
        config.model_config.hf_config.linear_attn_config["head_dim"] = 192


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_served_is_stock_and_said(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    refuse(case, config, monkeypatch)
    assert type(construct(config)) is KimiGatedDeltaNetAttention
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kda_dsv4"]
    assert line.startswith("falling back to upstream's code: --attention-backend")
    assert REFUSALS[case] in line
    config.compilation_config.static_forward_context.clear()
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match=re.escape(REFUSALS[case])):
        construct(config)


def test_a_failing_step_is_logged_once_and_raised(
    layer: Any, config: Any, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """vLLM then ends the engine: no request gets an answer from half a step."""
    metadata = step_metadata(layer, config, (40,), (0,), table(4))

    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("g must be finite")

    monkeypatch.setattr(operators, "prefill", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="g must be finite"):
            run_layer(layer, config, hidden(40), metadata)
    lines = [line for line in log_lines if "g must be finite" in line]
    assert lines == [
        f"kda-dsv4-backend: the step of KDA layer {layer.prefix} failed, and vllm will end this"
        " engine and its requests: ValueError: g must be finite"
    ]


def construct(config: Any) -> Any:
    with set_current_vllm_config(config):
        return KimiGatedDeltaNetAttention(
            config.model_config.hf_config, config, prefix="model.layers.0.self_attn"
        )
