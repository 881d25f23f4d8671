"""Kimi-K3, GLM-5.3-Flash and Ling-V3: each model's own layer class in the wheel, under the flag.

In fp32, so that what differs from the definition in float64 is no rounding of a projection.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend_core.engines import seams
from backend_core.engines.vllm_flag import flag_name
from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.numerics import relative_error
from kda_backend import selection
from kda_backend.engines import vllm_profile
from kda_backend.engines.vllm import REPLACED
from kda_backend.engines.vllm_layer import runtime_of
from kda_backend.family import FAMILY
from kda_backend.selection import KdaShape, select
from tests.engines.kda.vllm.harness import (
    DRAFT,
    NGRAM,
    SLOTS,
    bind_cache,
    check,
    engine_config,
    expect_states,
    hidden,
    run_layer,
    step_metadata,
    table,
)
from tests.engines.kda.vllm.models import MODELS, Model, build, definition_of
from tests.engines.kda.weights import Definition, checkpoint_weights

pytestmark = pytest.mark.usefixtures("in_fp32")
TOLERANCE = 1e-5
BF16_TOLERANCE = 3e-2  # a gate of low rank is rounded twice before its exponential


def part_of(model: Model) -> seams.Part:
    """What is relied on of a model's layer."""
    return REPLACED[model.upstream().__module__].part


def is_ours(layer: Any) -> bool:
    return type(layer).__module__.startswith("kda_backend.engines.vllm_")


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_serve_reads_the_fields_that_the_layer_reads(
    lower_bound: float | None, model: Model, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kda-dsv4 serve`` describes the layer that vLLM builds of the same configuration."""
    fields = vars(model.config(lower_bound))
    assert FAMILY.model_refusal(fields) is None
    asked = []
    monkeypatch.setattr(selection, "select", lambda *args: asked.append(args) or select(*args))
    FAMILY.describe_model(KNOWN_TARGETS["H200"], fields, 1, "vllm")
    layer = build(model, config, lower_bound)
    assert [shape for _, shape in asked] == [
        KdaShape(
            layer.num_heads, layer.num_heads, layer.head_dim, layer.head_dim, bool(lower_bound)
        )
    ]


def test_the_flag_replaces_the_class_and_keeps_its_parameters(model: Model, config: Any) -> None:
    upstream, ours = build(model, engine_config(flag=False, dtype="float32")), build(model, config)
    assert type(upstream) is model.upstream()
    assert is_ours(ours) and isinstance(ours, model.upstream())
    for name, parameter in upstream.named_parameters():
        mine = dict(ours.named_parameters())[name]
        assert (mine.shape, mine.dtype) == (parameter.shape, parameter.dtype), name
        assert torch.equal(mine, parameter), name
    assert ours.get_state_shape() == upstream.get_state_shape()
    assert ours.get_state_dtype() == upstream.get_state_dtype()
    # one class for all layers, by which vLLM groups them; upstream's but for the builder
    backend, kept = ours.get_attn_backend(), upstream.get_attn_backend()
    another = build(model, engine_config(flag=True, dtype="float32"))
    assert backend is another.get_attn_backend()
    assert backend.__bases__ == (kept,) and backend.get_name() == kept.get_name()
    assert issubclass(backend.get_builder_cls(), kept.get_builder_cls())


def test_prefills_match_the_definition(model: Model, layer: Any, config: Any) -> None:
    lengths, slots = (100, 17, 30), (3, 5, 7)
    x = hidden(sum(lengths))
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    before = [pool[untouched].clone() for pool in layer.kv_cache]
    metadata = step_metadata(layer, config, lengths, (0, 0, 0), table(*slots))
    o = run_layer(layer, config, x, metadata)
    check(layer, o, x, lengths, slots, [definition_of(model) for _ in slots])
    for pool, kept in zip(layer.kv_cache, before, strict=True):
        assert torch.equal(pool[untouched], kept)


def test_in_bf16_only_rounding_differs(model: Model) -> None:
    torch.set_default_dtype(torch.bfloat16)
    config = engine_config(flag=True)
    layer = build(model, config)
    bind_cache(layer, config)
    x = hidden(100)
    o = run_layer(layer, config, x, step_metadata(layer, config, (100,), (0,), table(3)))
    definition = definition_of(model)
    assert relative_error(o, definition.run(x)) < BF16_TOLERANCE
    assert relative_error(layer.kv_cache[1][3], definition.state[0]) < BF16_TOLERANCE


def test_chunked_prefill_continues_from_the_cache(model: Model, layer: Any, config: Any) -> None:
    x, definition, done = hidden(150), definition_of(model), 0
    for length in (64, 3, 1, 82):
        metadata = step_metadata(layer, config, (length,), (done,), table(4))
        o = run_layer(layer, config, x[done : done + length], metadata)
        assert relative_error(o, definition.run(x[done : done + length])) < TOLERANCE
        expect_states(layer, 4, definition)
        done += length


def test_decodes_alone_and_beside_prefills(model: Model, layer: Any, config: Any) -> None:
    slots = (2, 9, 4, 6)
    definitions = [definition_of(model) for _ in slots]
    x = hidden(70)
    metadata = step_metadata(layer, config, (40, 30), (0, 0), table(2, 9))
    check(layer, run_layer(layer, config, x, metadata), x, (40, 30), (2, 9), definitions[:2])
    x = hidden(2, seed=1)
    metadata = step_metadata(layer, config, (1, 1), (40, 30), table(2, 9))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 0)
    check(layer, run_layer(layer, config, x, metadata), x, (1, 1), (2, 9), definitions[:2])
    lengths = (1, 1, 65, 20)
    x = hidden(sum(lengths) + 9, seed=2)  # and padding
    metadata = step_metadata(layer, config, lengths, (41, 31, 0, 0), table(*slots))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    o = run_layer(layer, config, x, metadata)
    check(layer, o, x, lengths, slots, definitions)
    assert not o[sum(lengths) :].any()


def test_padded_requests_of_a_captured_batch_touch_nothing(
    model: Model, layer: Any, config: Any
) -> None:
    x, definitions = hidden(30), [definition_of(model)]
    metadata = step_metadata(layer, config, (30,), (0,), table(4))
    check(layer, run_layer(layer, config, x, metadata), x, (30,), (4,), definitions)
    before = [pool.clone() for pool in layer.kv_cache]
    y = hidden(4, seed=3)
    metadata = step_metadata(layer, config, (1, 1, 1, 1), (30, 1, 1, 1), table(4, 0, 0, 0))
    o = run_layer(layer, config, y, metadata)
    check(layer, o[:1], y[:1], (1,), (4,), definitions)
    assert not o[1:].any()
    others = [slot for slot in range(SLOTS) if slot != 4]
    for pool, kept in zip(layer.kv_cache, before, strict=True):
        assert torch.equal(pool[others], kept[others])


def test_lings_gate_may_have_no_bound(config: Any) -> None:
    model = MODELS["Ling-V3"]
    layer = build(model, config, None)
    assert is_ours(layer)
    bind_cache(layer, config)
    x = hidden(50)
    o = run_layer(layer, config, x, step_metadata(layer, config, (50,), (0,), table(4)))
    check(layer, o, x, (50,), (4,), [definition_of(model, None)])


def test_the_core_of_ling_runs_outside_of_graphs_as_upstreams() -> None:
    config = engine_config(flag=True, dtype="float32")
    config.compilation_config.splitting_ops = ["vllm::unified_attention"]
    build(MODELS["Ling-V3"], config)
    assert "vllm::kda_dsv4_core" in config.compilation_config.splitting_ops


def test_the_profile_run_warms_up_and_returns_zeros(model: Model, layer: Any, config: Any) -> None:
    del layer.kv_cache
    vllm_profile._warm.clear()
    assert not run_layer(layer, config, hidden(100), None).any()
    assert (layer.kda_runtime, False) in vllm_profile._warm


@pytest.mark.parametrize("index", [0, 5])
def test_k3s_layer_runs_the_checkpoint_with_a_bounded_gate(index: int, config: Any) -> None:
    weights = checkpoint_weights(index, "checkpoint_bounded")
    layer = build(MODELS["Kimi-K3"], config, weights=weights)
    bind_cache(layer, config)
    x, definition = hidden(150, seed=2), Definition(weights, -5.0)
    for begin, length in ((0, 90), (90, 60)):
        metadata = step_metadata(layer, config, (length,), (begin,), table(4))
        o = run_layer(layer, config, x[begin : begin + length], metadata)
        assert relative_error(o, definition.run(x[begin : begin + length])) < 1e-4
    assert relative_error(layer.kv_cache[1][4], definition.state[0]) < 1e-4


def test_drafts_are_verified_from_what_was_accepted(model: Model, drafting: Any) -> None:
    layer = build(model, drafting)
    bind_cache(layer, drafting)
    blocks = torch.tensor([[2, 3, 4, 5], [7, 8, 9, 10]], dtype=torch.int32)
    texts = [hidden(60, seed=1), hidden(60, seed=2)]
    done = [20, 9]
    x = torch.cat([text[:n] for text, n in zip(texts, done, strict=True)])
    run_layer(layer, drafting, x, step_metadata(layer, drafting, done, (0, 0), blocks, (0, 0)))
    for accepted, following in (((1, 1), (4, 2)), ((4, 2), (2, 3)), ((2, 3), (1, 1))):
        # what was not accepted is drafted anew, as other tokens
        x = torch.cat([text[n : n + DRAFT] for text, n in zip(texts, done, strict=True)])
        metadata = step_metadata(layer, drafting, (DRAFT, DRAFT), done, blocks, accepted)
        assert metadata.num_spec_decodes == 2
        o = run_layer(layer, drafting, x, metadata)
        for n, text in enumerate(texts):
            definition = definition_of(model)
            definition.run(text[: done[n]])
            want = definition.run(x[n * DRAFT : (n + 1) * DRAFT])
            assert relative_error(o[n * DRAFT : (n + 1) * DRAFT], want) < TOLERANCE
            state = layer.kv_cache[1][blocks[n, DRAFT - 1]]
            assert relative_error(state, definition.state[0]) < TOLERANCE
            done[n] += following[n]


def recording() -> tuple[Any, Any]:
    """Kimi-K3's layer with drafts under ``--use-replayssm``, and its configuration."""
    config = engine_config(flag=True, dtype="float32", speculative_config=NGRAM)
    config.cache_config.use_replayssm = config.cache_config.use_kda_recoverssm = True
    layer = build(MODELS["Kimi-K3"], config)
    bind_cache(layer, config)
    return layer, config


def test_kimi_k3s_drafts_as_records_that_vllm_folds(caplog: pytest.LogCaptureFixture) -> None:
    """Verified here, beside a prompt too; states and windows by upstream's own commit."""
    layer, config = recording()
    if not hasattr(layer, "recoverssm_records"):
        assert "--use-replayssm asks for records" in refused(caplog)
        return
    assert is_ours(layer) and layer.recoverssm_backend == "triton"
    verify_and_commit(MODELS["Kimi-K3"], layer, config)


def verify_and_commit(model: Model, layer: Any, config: Any) -> None:
    """Steps of two drafts, one of them beside a prompt."""
    for x in (layer.recoverssm_records.correction, layer.recoverssm_records.key_gate):
        x.fill_(torch.nan)
    blocks = torch.tensor([[2], [7], [4]], dtype=torch.int32)
    texts, done = [hidden(60, seed=seed) for seed in (1, 2, 3)], [20, 9, 0]
    x = torch.cat([text[:n] for text, n in zip(texts, done[:2], strict=False)])
    metadata = step_metadata(layer, config, done[:2], (0, 0), blocks[:2], (0, 0))
    run_layer(layer, config, x, metadata)
    for step, following in enumerate(((4, 2), (2, 3), (1, 1))):
        lengths = (DRAFT, DRAFT, 30) if step == 1 else (DRAFT, DRAFT)
        n = len(lengths)
        parts = [t[d : d + k] for t, d, k in zip(texts, done, lengths, strict=False)]
        drafted = (1, 1, 0)[:n]
        metadata = step_metadata(layer, config, lengths, done[:n], blocks[:n], drafted)
        assert metadata.num_spec_decodes == 2
        before = layer.kv_cache[1][[2, 7]].clone()
        o = run_layer(layer, config, torch.cat(parts), metadata)
        assert torch.equal(layer.kv_cache[1][[2, 7]], before)
        metadata.commit_recoverssm_state(torch.tensor([*following, 30][:n], dtype=torch.int32))
        for i, (text, part) in enumerate(zip(texts, parts, strict=False)):
            definition = definition_of(model)
            want = definition.run(torch.cat([text[: done[i]], part]))[done[i] :]
            assert relative_error(o[i * DRAFT : i * DRAFT + len(part)], want) < TOLERANCE
            done[i] += following[i] if i < 2 else 30
            definition = definition_of(model)
            definition.run(text[: done[i]])
            state = layer.kv_cache[1][int(blocks[i, 0])]
            assert relative_error(state, definition.state[0]) < TOLERANCE


def test_the_profile_run_compiles_what_keeps_records() -> None:
    layer, config = recording()
    if not is_ours(layer):
        return
    del layer.kv_cache
    vllm_profile._warm.clear()
    assert not run_layer(layer, config, hidden(100), None).any()


@pytest.mark.parametrize("others", ["prefills", "decodes"])
def test_drafts_beside_other_tokens(model: Model, drafting: Any, others: str) -> None:
    """Kimi-K3's metadata leaves single tokens beside drafts decodes; the others' calls them
    prefills."""
    layer = build(model, drafting)
    bind_cache(layer, drafting)
    blocks = torch.tensor([[7, 0, 0, 0], [2, 3, 4, 5], [8, 9, 10, 11]], dtype=torch.int32)
    texts = [hidden(60, seed=seed) for seed in range(3)]
    done = [12, 20, 7]
    x = torch.cat([text[:n] for text, n in zip(texts, done, strict=True)])
    run_layer(layer, drafting, x, step_metadata(layer, drafting, done, (0, 0, 0), blocks, (0,) * 3))
    lengths = (1, 3, 1) if others == "decodes" else (1, 3, 30)
    x = torch.cat([t[d : d + n] for t, n, d in zip(texts, lengths, done, strict=True)])
    metadata = step_metadata(layer, drafting, lengths, done, blocks, (0, 1, 0))
    assert metadata.num_spec_decodes == 1
    if others == "decodes" and model.name == "Kimi-K3":
        assert metadata.num_decodes == 2
    o = run_layer(layer, drafting, x, metadata)
    begin = 0
    for n, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        definition = definition_of(model)
        definition.run(text[: done[n]])
        want = definition.run(x[begin : begin + length])
        assert relative_error(o[begin : begin + length], want) < TOLERANCE
        last = blocks[n, length - 1 if n == 1 else 0]
        assert relative_error(layer.kv_cache[1][last], definition.state[0]) < TOLERANCE
        begin += length


def refused(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kda_dsv4"]
    start = f"falling back to upstream's code: --attention-backend {flag_name('kda')}: "
    assert line.startswith(start)
    return line.removeprefix(start)


@pytest.mark.parametrize("name", ["GLM-5.3-Flash", "Ling-V3"])
@pytest.mark.parametrize("case", ["bound", "offload"])
def test_what_cannot_be_served_stays_upstreams(
    name: str, case: str, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS[name]
    if case == "offload":
        config.offload_config.uva.cpu_offload_gb = 1
    layer = build(model, config, -7.0 if case == "bound" else -5.0)
    assert type(layer) is model.upstream()
    assert (
        refused(caplog)
        == {
            "bound": "the lower bound of the KDA gate must be in [-5, 0), got -7.0",
            "offload": "weights are kept in host memory, and those of convolutions are packed",
        }[case]
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("kda_prefill_backend", "flashkda"), ("kda_decode_backend", "native")],
)
def test_kernels_that_the_user_names_are_upstreams(
    model: Model, layer: Any, config: Any, caplog: pytest.LogCaptureFixture, option: str, value: str
) -> None:
    """The layer's class refuses them on a CPU, so the decision is asked for by itself."""
    config.additional_config = {option: value}
    assert runtime_of(config, layer, -5.0, part_of(model)) is None
    assert refused(caplog) == f"{option} asks for the kernels of {value}"


def test_replayssm_is_upstreams(
    model: Model, layer: Any, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config.cache_config.use_replayssm = True
    assert runtime_of(config, layer, -5.0, part_of(model)) is None
    line = "--use-replayssm asks for records that upstream's layers keep"
    assert refused(caplog) == line


def test_replayssm_with_drafts_is_named_where_upstreams_answers_are_wrong(
    model: Model, drafting: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's low-rank Kimi-Linear would read other requests' slots."""
    layer = build(model, drafting)
    drafting.cache_config.use_replayssm = True
    assert runtime_of(drafting, layer, -7.0, part_of(model)) is None
    is_wrong = model.upstream().__name__ == "KimiGatedDeltaNetAttention"
    assert ("serve without --use-replayssm" in refused(caplog)) == is_wrong
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="--use-replayssm"):
        runtime_of(drafting, layer, -7.0, part_of(model))


def test_a_changed_body_is_served_and_said_but_not_in_strict_mode(
    model: Model, config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    part = part_of(model)
    note = f"vllm 0.34.0 is not tested with this release; {part.name}: 1 body changed: forward"
    monkeypatch.setattr(seams, "_verdict", lambda part: (None, note))
    assert is_ours(build(model, config))
    assert f"kda-dsv4-backend: {note}" in caplog.messages
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="1 body changed: forward"):
        build(model, engine_config(flag=True, dtype="float32"))
