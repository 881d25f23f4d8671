"""``VLLM_BATCH_INVARIANT=1``: the layers that are served, cuts of prompts, and bits of decodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.sampling_params import SamplingParams
from vllm.v1.attention import selector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kda_backend.engines import vllm_cuts
from tests.engines.kda.vllm.harness import (
    NGRAM,
    bind_cache,
    build_layer,
    cache_spec,
    engine_config,
    hidden,
    run_layer,
    step_metadata,
    table,
)
from tests.engines.kda.vllm.models import Model, build
from tests.engines.vllm_process import cuda_platform

BUDGET = 256


@pytest.fixture(autouse=True)
def batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def test_layers_are_served_whose_backend_says_so(model: Model) -> None:
    config = engine_config(flag=True)
    layer = build(model, config)
    assert layer.kda_runtime.selection.shape.batch_invariant
    assert layer.get_attn_backend().supports_batch_invariance()


def test_without_the_flag_upstream_refuses() -> None:
    selector._cached_get_mamba_attn_backend.cache_clear()  # of tests without the variable
    layer = build_layer(engine_config(flag=False))
    with pytest.raises(RuntimeError, match="VLLM batch_invariant mode is not supported for"):
        layer.get_attn_backend()


def test_a_decode_has_its_bits_beside_prefills() -> None:
    """And among other decodes; one of them is of a prompt's last token."""
    config = engine_config(flag=True)
    layer = build_layer(config)
    x = hidden(120)

    def decode(lengths: tuple[int, ...], done: tuple[int, ...], slots: tuple[int, ...]) -> Any:
        bind_cache(layer, config)
        run_layer(layer, config, x[:30], step_metadata(layer, config, (30,), (0,), table(3)))
        tokens = torch.cat([x[40 : 40 + sum(lengths) - 1], x[30:31]])
        place = slots.index(3)
        begin = sum(lengths[:place])
        rows = [*range(begin), sum(lengths) - 1, *range(begin, sum(lengths) - 1)]
        metadata = step_metadata(layer, config, lengths, done, table(*slots))
        o = run_layer(layer, config, tokens[rows], metadata)
        return o[begin], layer.kv_cache[0][3], layer.kv_cache[1][3]

    alone = decode((1,), (30,), (3,))
    for call in (
        ((1, 65), (30, 0), (3, 5)),
        ((1, 1, 1), (9, 30, 9), (4, 3, 6)),
        ((1, 1, 5, 7), (9, 30, 0, 64), (4, 3, 6, 7)),
    ):
        for got, want in zip(decode(*call), alone, strict=True):
            assert torch.equal(got, want)


def test_servers_that_cannot_keep_the_promise_are_refused(log_lines: list[str]) -> None:
    def reason(config: Any) -> str:
        assert type(build_layer(config)) is KimiGatedDeltaNetAttention
        config.compilation_config.static_forward_context.clear()
        return log_lines.pop()

    drafts = "VLLM_BATCH_INVARIANT is set, and whether a token runs as a decode or as a prefill"
    assert drafts in reason(engine_config(flag=True, speculative_config=NGRAM))
    config = engine_config(flag=True)
    config.scheduler_config.long_prefill_token_threshold = 100
    assert "room for 128 tokens of a prompt, got 100" in reason(config)
    config = engine_config(flag=True)
    config.cache_config.enable_prefix_caching = True
    assert "the prefix cache keeps states that decodes have left" in reason(config)


def test_the_prefix_cache_is_off_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    cuda_platform(monkeypatch)

    def caches(flag: bool) -> tuple[bool, str]:
        cache = engine_config(flag=flag, enable_prefix_caching=True).cache_config
        return cache.enable_prefix_caching, cache.mamba_cache_mode

    assert caches(True) == (False, "none")
    assert any("VLLM_BATCH_INVARIANT is set, so the prefix cache is off" in x for x in log_lines)
    assert caches(False) == (True, "align")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert caches(True) == (True, "align")


def scheduler_of(config: Any) -> Scheduler:
    """The engine's own, of a model with one KDA layer and one of attention."""
    config.scheduler_config.enable_chunked_prefill = True  # which vLLM turns off on a CPU
    config.scheduler_config.max_num_batched_tokens = BUDGET
    layer = build_layer(config)
    config.cache_config.num_gpu_blocks = 1000
    spec = cache_spec(layer, config)
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["kda"], spec)]
    caches = KVCacheConfig(num_blocks=1000, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = StructuredOutputManager(config)
    return Scheduler(config, caches, manager, block_size=spec.block_size)


def cuts_of(scheduler: Any, lengths: tuple[int, ...]) -> dict[str, list[int]]:
    """The tokens of each prompt's steps until all have been scheduled."""
    for n, length in enumerate(lengths):
        params = SamplingParams(max_tokens=1)
        scheduler.add_request(Request(str(n), list(range(length)), params, None))
    found: dict[str, list[int]] = {str(n): [] for n in range(len(lengths))}
    for _ in range(20):
        for name, tokens in scheduler.schedule().num_scheduled_tokens.items():
            found[name].append(tokens)
        done = all(sum(steps) >= n for steps, n in zip(found.values(), lengths, strict=True))
        if done:
            return found
    raise AssertionError(f"prompts of {lengths} wait: {found}")


def test_the_scheduler_cuts_prompts_at_multiples_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (100, 449, 70, 513)
    config = engine_config(flag=True)
    for steps, length in zip(cuts_of(scheduler_of(config), lengths).values(), lengths, strict=True):
        ends = torch.tensor(steps).cumsum(0).tolist()
        assert ends[-1] == length and steps[-1] > 1
        assert all(end % 64 == 0 for end in ends[:-1]), steps
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    config = engine_config(flag=True)
    steps = cuts_of(scheduler_of(config), lengths)["1"]
    assert steps[0] == BUDGET - 100  # upstream fills the step


def test_a_last_token_is_not_cut_off() -> None:
    def tokens(prompt: int, computed: int, room: int, answered: int = 0) -> int:
        request = SimpleNamespace(
            num_prompt_tokens=prompt,
            num_computed_tokens=computed,
            num_tokens=prompt + answered,
        )
        return vllm_cuts.tokens_to_cut(request, room)

    assert tokens(129, 0, 128) == 64  # 65 are left, not one
    assert tokens(129, 64, 64) == 0  # it waits for room for all of them
    assert tokens(129, 64, 65) == 65
    assert tokens(200, 0, 100) == 64
    assert tokens(200, 0, 200) == 200
    assert tokens(200, 200, 1, answered=1) == 1  # a decode


def test_mla_reads_all_prompts_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """Where the builder is of a backend that reads any number of tokens so, as FlashAttention's."""
    base = mla_attention.MLACommonMetadataBuilder

    class AnyLength(base):  # type: ignore[misc, valid-type]
        query_len_support = mla_attention.QueryLenSupport.VARLEN
        reorder_batch_threshold = 512

    def upstream(self: Any, *args: Any, **options: Any) -> None:
        self.reorder_batch_threshold = type(self).reorder_batch_threshold

    monkeypatch.setattr(base, "__init__", upstream)
    for _ in range(2):
        vllm_cuts.read_from_the_cache(mla_attention)

    def threshold(kind: type, config: Any) -> int:
        builder = object.__new__(kind)
        base.__init__(builder, None, ["layer"], config, torch.device("cpu"))
        return int(builder.reorder_batch_threshold)

    config = engine_config(flag=True)
    config.scheduler_config.max_num_batched_tokens = 8192
    assert threshold(AnyLength, config) == 8192
    assert not log_lines
    assert threshold(base, config) == 1
    assert "adds up the parts of a prompt that a step has cut" in log_lines.pop()
    assert threshold(AnyLength, engine_config(flag=False)) == 512
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert threshold(AnyLength, config) == 512
