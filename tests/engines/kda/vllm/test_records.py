"""Drafts as records: requests in vLLM's own scheduler and model state, graphs, memory, refusals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.worker.gpu import buffer_utils

from backend_core.engines import seams
from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.numerics import relative_error
from kda_backend.engines import vllm_drafts
from kda_backend.engines.draft_records import VARIABLE
from kda_backend.engines.vllm_seams import VLLM_RECORDS
from tests.engines.kda.vllm.graph import SIZE, Graph
from tests.engines.kda.vllm.harness import (
    DRAFT,
    NGRAM,
    SLOTS,
    bind_cache,
    cache_spec,
    engine_config,
    hidden,
    run_layer,
    step_metadata,
)
from tests.engines.kda.vllm.models import MODELS, build, definition_of
from tests.engines.kda.vllm.runner import WRONG, Runner
from tests.engines.kda.weights import Definition, drawn

pytestmark = [
    pytest.mark.usefixtures("in_fp32"),
    pytest.mark.skipif(
        seams.difference(VLLM_RECORDS) is not None, reason="this release is not served"
    ),
]
NAMES = ["GLM-5.3-Flash", "Kimi-Linear", "Ling-V3"]
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every GPU but Hopper's needs it."""
    monkeypatch.setenv(VARIABLE, "1")


def drafting_config(*, aligned: bool = False, **options: Any) -> VllmConfig:
    """With drafts of four tokens, and with ``aligned`` a prefix cache of blocks of 16 tokens."""
    config = engine_config(
        **{"flag": True, "dtype": "float32", "speculative_config": NGRAM, **options}
    )
    config.scheduler_config.enable_chunked_prefill = True  # which vLLM turns off on a CPU
    config.scheduler_config.max_num_batched_tokens = 48
    config.scheduler_config.async_scheduling = False
    cache = config.cache_config
    cache.enable_prefix_caching = aligned
    cache.mamba_cache_mode = "align" if aligned else "none"
    cache.mamba_block_size = 16 if aligned else config.model_config.max_model_len
    if aligned:
        cache.block_size = cache.hash_block_size = cache.cache_hit_alignment_tokens = 16
    return config


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not pinned; a cache group takes over another's metadata by upstream's rule for a
    GPU, and the runner computes its slots."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    upstream = GDNAttentionMetadataBuilder.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        upstream(self, *args, **options)
        if type(self) is GDNAttentionMetadataBuilder:
            self.supports_update_block_table = True
            self.mamba_aligned_state_indices = None

    monkeypatch.setattr(GDNAttentionMetadataBuilder, "__init__", init)


@pytest.mark.parametrize(
    ("name", "states", "tolerance"),
    [*((name, "float32", TOLERANCE) for name in NAMES), ("Kimi-Linear", "float16", 2e-3)],
)
def test_requests_finish_are_preempted_resumed_and_reordered(
    name: str, states: str, tolerance: float, as_on_a_gpu: None
) -> None:
    """Whatever is accepted, each output is that of the tokens before it, also behind a prefix whose
    state the cache kept where a block ended among drafts."""
    config = drafting_config(aligned=True)
    config.cache_config.mamba_ssm_cache_dtype = states
    runner = Runner(MODELS[name], config, 16, seed=3, tolerance=tolerance)
    drawn = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [drawn.randrange(WRONG) for _ in range(number)]

    shared = tokens(36)
    for n in range(3):
        runner.add(str(n), shared + tokens(16 - n), prompt=42 + n)
    for _ in range(4):
        runner.step()
    runner.add("late", tokens(26), prompt=20)
    runner.run()
    assert runner.seen == {"preempted", "mixed", "short", "hit", "crossed", "padded"}


@pytest.mark.parametrize("name", ["Kimi-K3", "Kimi-Linear"])
def test_a_prompt_whose_tokens_come_one_by_one(name: str, as_on_a_gpu: None) -> None:
    """The runner lets them run as drafts of which nothing is sampled. Kimi-K3 has vLLM's commit."""
    config = drafting_config()
    if name == "Kimi-K3":
        config.cache_config.use_replayssm = config.cache_config.use_kda_recoverssm = True
    config.scheduler_config.long_prefill_token_threshold = 1
    runner = Runner(MODELS[name], config, 12, seed=1)
    for n in range(2):
        runner.add(str(n), list(range(5 * n, 5 * n + 14)), prompt=8)
    runner.run()


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("keeps", ["0", "1"])
def test_a_prompt_of_one_token_beside_others(
    keeps: str, aligned: bool, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state has read no token that vLLM drafts for it before anything is known of it."""
    monkeypatch.setenv(VARIABLE, keeps)
    runner = Runner(MODELS["Ling-V3"], drafting_config(aligned=aligned), 24, seed=1)
    runner.add("0", list(range(30)), prompt=20)
    for _ in range(2):
        runner.step()
    runner.add("1", list(range(40, 50)), prompt=1)
    runner.run()


def layer_of(name: str, config: VllmConfig) -> Any:
    """A layer with a cache, whose records a runner commits."""
    layer = build(MODELS[name], config)
    bind_cache(layer, config)
    layer.recoverssm_records.committed = True
    return layer


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_serves_other_drafts_than_it_was_captured_with(name: str) -> None:
    config, model = drafting_config(), MODELS[name]
    layer = layer_of(name, config)
    graph = Graph(layer, config, DRAFT)
    texts = {slot: hidden(40, seed=slot) for slot in (3, 7, 5)}
    done = dict.fromkeys(texts, 8)
    for slot, text in texts.items():
        table = torch.tensor([[slot, 0, 0, 0]], dtype=torch.int32)
        run_layer(layer, config, text[:8], step_metadata(layer, config, (8,), (0,), table, (0,)))
    kept = [pool.clone() for pool in layer.kv_cache]
    graph.capture()
    for pool, before in zip(layer.kv_cache, kept, strict=True):
        assert torch.equal(pool[1:], before[1:])  # dummy requests are the null block's
    for slots, accepted in (([3, 7, 5], [4, 1, 2]), ([7], [3]), ([5, 3], [2, 4])):
        parts = [texts[slot][done[slot] : done[slot] + DRAFT] for slot in slots]
        padding = torch.zeros((SIZE - len(slots)) * DRAFT, 256)
        drafted = torch.tensor([DRAFT - 1] * len(slots) + [-1] * (SIZE - len(slots)))
        batch, ones = graph.batch(slots), torch.ones(SIZE, dtype=torch.int32)
        metadata = graph.builder.build(0, batch, ones, drafted)
        o = graph.replay(torch.cat([*parts, padding]), metadata)
        sampled = [*accepted, *[0] * (SIZE - len(slots))]
        metadata.commit_recoverssm_state(torch.tensor(sampled, dtype=torch.int32))
        for n, (slot, part) in enumerate(zip(slots, parts, strict=True)):
            want = definition_of(model).run(torch.cat([texts[slot][: done[slot]], part]))
            out = o[n * DRAFT : (n + 1) * DRAFT]
            assert relative_error(out, want[done[slot] :]) < TOLERANCE
            done[slot] += accepted[n]
            definition = definition_of(model)
            definition.run(texts[slot][: done[slot]])
            assert relative_error(layer.kv_cache[1][slot], definition.state[0]) < TOLERANCE
    others = [slot for slot in range(1, SLOTS) if slot not in texts]
    for pool, before in zip(layer.kv_cache, kept, strict=True):
        assert torch.equal(pool[others], before[others])


def test_a_padded_step_commits_what_its_requests_sampled() -> None:
    """A graph's batch has rows of nobody, of which the runner samples nothing."""
    config = drafting_config(aligned=True)
    graph = Graph(layer_of("Ling-V3", config), config, DRAFT)
    slots, accepted = [3, 7, 5], [4, 0, 2]
    drafted = torch.tensor([DRAFT - 1] * 3 + [-1])
    ones = torch.ones(SIZE, dtype=torch.int32)
    x = hidden(SIZE * DRAFT)
    metadata = graph.builder.build(0, graph.batch(slots), ones, drafted)
    definitions = [definition_of(MODELS["Ling-V3"]) for _ in slots]
    for slot, definition in zip(slots, definitions, strict=True):
        definition.window = graph.layer.kv_cache[0][slot].T[:, :3].clone()
        definition.state = graph.layer.kv_cache[1][slot].clone()[None]
    run_layer(graph.layer, graph.config, x, metadata)
    sampled = torch.tensor(accepted, dtype=torch.int32)
    found = metadata.commit_recoverssm_state(sampled)
    # 16 tokens before the draft of each, and one more where nothing was sampled
    assert (found.num_computed_tokens + sampled).tolist() == [20, 17, 18]
    for n, (slot, definition) in enumerate(zip(slots, definitions, strict=True)):
        definition.run(x[n * DRAFT : n * DRAFT + max(accepted[n], 1)])
        assert relative_error(graph.layer.kv_cache[1][slot], definition.state[0]) < TOLERANCE


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_request_takes_no_blocks_for_its_drafts(
    name: str, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own count of a request's memory in one layer."""
    config = drafting_config(aligned=aligned)
    monkeypatch.setenv(VARIABLE, "0")
    states = cache_spec(build(MODELS[name], config), config)
    monkeypatch.setenv(VARIABLE, "1")
    config = drafting_config(aligned=aligned)
    layer = build(MODELS[name], config)
    records = cache_spec(layer, config)
    resident = 1 + aligned * (1 + states.num_prefill_checkpoint_blocks)
    page = states.page_size_bytes
    assert records.page_size_bytes == page
    assert states.max_memory_usage_bytes(config) == page * (resident + DRAFT - 1)
    assert records.max_memory_usage_bytes(config) == page * resident
    kept = [layer.recoverssm_records.correction, layer.recoverssm_records.key_gate]
    heads, dim, rows = layer.local_num_heads, layer.head_dim, config.scheduler_config.max_num_seqs
    per_request = sum(x.nbytes for x in kept) // rows
    assert per_request == heads * DRAFT * (4 * dim + 2 * dim * kept[1].element_size())
    assert per_request < page * (DRAFT - 1) / 20


def test_states_in_float16_are_cut_off_where_drafts_are_committed() -> None:
    """Of all layers of a cache group at once, whose blocks lie apart."""
    from kda_backend.engines.vllm_records import CommitGroup  # of releases that commit any

    config = drafting_config()
    config.cache_config.mamba_ssm_cache_dtype = "float16"
    model = MODELS["Kimi-Linear"]
    layers = [build(model, config, index=index) for index in (0, 1)]
    for layer in layers:
        bind_cache(layer, config)
        layer.recoverssm_records.committed = True
    blocks = torch.tensor([[3, 0, 0, 0]], dtype=torch.int32)
    x, definition = hidden(8 + DRAFT), definition_of(model)
    group = CommitGroup(config, [layer.prefix for layer in layers])
    for layer in layers:
        run_layer(layer, config, x[:8], step_metadata(layer, config, (8,), (0,), blocks, (0,)))
    for layer in layers:
        metadata = step_metadata(layer, config, (DRAFT,), (8,), blocks, (1,))
        run_layer(layer, config, x[8:], metadata)
    layers[1].recoverssm_records.correction[0, 0, 1, 0] = 1e9
    metadata.kda_commit.group = group
    metadata.commit_recoverssm_state(torch.tensor([2], dtype=torch.int32))
    definition.run(x[:10])
    states = [layer.kv_cache[1][3] for layer in layers]
    assert states[0].dtype == torch.float16
    assert relative_error(states[0], definition.state[0]) < 2e-3
    assert states[1].isfinite().all() and (states[1][0, 0].abs() == 65504.0).any()
    assert relative_error(states[1][1:], definition.state[0, 1:]) < 2e-3


def test_a_token_behind_which_nothing_is_sampled_is_one_of_the_states() -> None:
    """Also for the runner, which counts by it which block holds the state: here a block's first."""
    config = drafting_config(aligned=True)
    layer = layer_of("Ling-V3", config)
    blocks = torch.tensor([[3, 5, 0, 0]], dtype=torch.int32)
    x, definition = hidden(17), definition_of(MODELS["Ling-V3"])
    definition.run(x)
    run_layer(layer, config, x[:16], step_metadata(layer, config, (16,), (0,), blocks, (0,)))
    for pool in layer.kv_cache:
        pool[5] = pool[3]  # the engine's copy to the block that the step ends in
    metadata = step_metadata(layer, config, (1,), (16,), blocks, (1,))
    assert metadata.num_spec_decodes == 1
    run_layer(layer, config, x[16:], metadata)
    nothing = torch.zeros(1, dtype=torch.int32)
    found = metadata.commit_recoverssm_state(nothing)
    assert (found.num_computed_tokens + nothing).tolist() == [17] and found.block_size == 16
    assert relative_error(layer.kv_cache[1][5], definition.state[0]) < TOLERANCE
    assert relative_error(layer.kv_cache[0][5].T[:, :3], definition.window) < TOLERANCE


def test_weights_that_are_loaded_anew_are_those_of_the_commit() -> None:
    config = drafting_config()
    graph = Graph(layer_of("Ling-V3", config), config, DRAFT)
    layer, weights = graph.layer, drawn(2, MODELS["Ling-V3"].low_rank)
    x, slots = hidden(SIZE * DRAFT), [3, 5, 7, 2]
    ones, drafted = torch.ones(SIZE, dtype=torch.int32), torch.full((SIZE,), DRAFT - 1)
    for moved in (0.0, 0.5, -0.25):
        for name in ("A_log", "dt_bias"):
            weights[name] = weights[name] + moved
            parameter = getattr(layer, name)
            parameter.data.copy_(weights[name].view(parameter.shape))
        window, state = layer.kv_cache[0][3].T[:, :3].clone(), layer.kv_cache[1][3].clone()
        definition = Definition(weights, -5.0, window, state)
        definition.run(x[:DRAFT])
        metadata = graph.builder.build(0, graph.batch(slots), ones, drafted)
        run_layer(layer, graph.config, x, metadata)
        metadata.commit_recoverssm_state(ones * DRAFT)
        assert relative_error(layer.kv_cache[1][3], definition.state[0]) < TOLERANCE


def refused(config: VllmConfig, caplog: pytest.LogCaptureFixture, name: str = "Ling-V3") -> str:
    """The reason that the log has, of a layer which keeps states."""
    caplog.clear()
    layer = build(MODELS[name], config)
    assert layer.recoverssm_records is None and layer.kda_runtime is not None
    drafted = config.num_speculative_tokens
    assert cache_spec(layer, config).num_speculative_blocks == drafted
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kda_dsv4"]
    start, _, reason = line.partition(": drafts of KDA layers keep states and no records: ")
    assert start == ("--use-replayssm" if config.cache_config.use_replayssm else f"{VARIABLE}=1")
    return reason


def test_what_is_not_served_is_named_and_keeps_states(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(drafting_config(speculative_config=None), caplog) == "the server does not draft"
    assert "under --use-replayssm" in refused(drafting_config(), caplog, "Kimi-K3")
    config = drafting_config()
    config.speculative_config.target_model_config = drafting_config().model_config
    assert "proposes drafts" in refused(config, caplog)  # as of a draft's model
    config = drafting_config()
    config.parallel_config.pipeline_parallel_size = 2
    assert "a pipeline's later steps" in refused(config, caplog)
    config = drafting_config()
    config.offload_config.prefetch.offload_group_size = 2  # Ling-V3's layer is not served then
    assert "a commit reads gates after" in refused(config, caplog, "Kimi-Linear")
    config = drafting_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "first model runner" in refused(config, caplog)
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="first model runner"):
        build(MODELS["Ling-V3"], drafting_config())


@pytest.mark.parametrize(
    ("gpu", "drafted", "kept"),
    [("H200", 3, True), ("H200", 2, False), ("A100", 7, False), ("H200", None, False)],
)
def test_long_drafts_are_kept_as_records_on_hopper(
    gpu: str, drafted: int | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody asks; where they cannot be served the log has nothing of them."""
    monkeypatch.delenv(VARIABLE)
    drafts = None if drafted is None else {**NGRAM, "num_speculative_tokens": drafted}
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    for runner, has_records in (("1", kept), ("0", False)):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        config = drafting_config(speculative_config=drafts)
        layer = build(MODELS["Ling-V3"], config)
        with set_current_vllm_config(config):
            vllm_drafts.keep_records(config, layer, -5.0, KNOWN_TARGETS[gpu])
        assert (layer.recoverssm_records is not None) == has_records
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = drafting_config(speculative_config=drafts)
    layer = build(MODELS["Ling-V3"], config)
    config.cache_config.mamba_ssm_cache_dtype = "float16"
    vllm_drafts.keep_records(config, layer, -5.0, KNOWN_TARGETS[gpu])
    assert layer.recoverssm_records is None  # in this format one has to ask
    config.cache_config.mamba_ssm_cache_dtype = "float32"
    monkeypatch.setenv(VARIABLE, "0")
    vllm_drafts.keep_records(config, layer, -5.0, KNOWN_TARGETS[gpu])
    assert layer.recoverssm_records is None


def test_vllms_own_records_of_kimi_k3_are_not_served_beside_float16() -> None:
    config = drafting_config()
    config.cache_config.use_replayssm = config.cache_config.use_kda_recoverssm = True
    layer = build(MODELS["Kimi-K3"], config)
    assert vllm_drafts.refusal(config, layer) is None
    config.cache_config.mamba_ssm_cache_dtype = "float16"
    assert "beyond float16's range" in str(vllm_drafts.refusal(config, layer))


def test_another_value_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "states")
    with pytest.raises(ValueError, match=f"{VARIABLE} must be 0 or 1, got 'states'"):
        build(MODELS["Ling-V3"], drafting_config())


def test_kimi_linear_has_vllms_own_option(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes it for this model, has no blocks for drafts then, and its layer no records."""
    monkeypatch.delenv(VARIABLE)
    config = drafting_config(use_replayssm=True)
    assert config.cache_config.use_kda_recoverssm
    layer = build(MODELS["Kimi-Linear"], config)
    assert layer.recoverssm_records is not None
    assert cache_spec(layer, config).num_speculative_blocks == 0
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = drafting_config(use_replayssm=True)
    assert "first model runner" in refused(config, caplog, "Kimi-Linear")


def test_a_server_that_commits_nothing_does_not_start() -> None:
    config = drafting_config()
    layer = build(MODELS["Ling-V3"], config)
    bind_cache(layer, config)
    with pytest.raises(RuntimeError, match="this model's runner does not commit"):
        step_metadata(layer, config, (8,), (0,), torch.ones(1, 4, dtype=torch.int32), (0,))


def test_a_block_holds_a_draft() -> None:
    config = drafting_config(aligned=True)
    config.cache_config.mamba_block_size = DRAFT - 1
    with pytest.raises(ValueError, match="records of drafts of 4 tokens need blocks of as many"):
        cache_spec(build(MODELS["Ling-V3"], config), config)
