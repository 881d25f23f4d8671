"""Decode steps through vLLM's layer and metadata builder: results, graphs, and who serves what."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.mla.flashattn_mla import FlashAttnMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

from backend_core.engines import entry
from backend_core.target import Target
from backend_core.testing.numerics import relative_error
from benchmarks.recall_vllm import zero_mla_decodes
from mla_backend.engines import vllm_mla
from mla_backend.engines.mla_decoder import MlaStep
from mla_backend.engines.vllm_mla import PlannedDecode, SplitKvMLABackend, _uniform_tokens
from tests.engines.mla.flash import TARGETS, TOLERANCE
from tests.engines.mla.vllm import flash_attention
from tests.engines.mla.vllm.harness import (
    Runner,
    build_builder,
    build_layer,
    engine_config,
    queries,
    run_layer,
)
from tests.mla.beside import run_up_to

DRAFT = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
RAGGED = (100, 1, 944, 1003, 63)

Serve = Callable[..., "Server"]


class Server:
    """A layer and its builder of one backend, on the runner's buffers."""

    def __init__(
        self,
        heads: int,
        runner: Runner,
        backend: type = SplitKvMLABackend,
        **options: Any,
    ) -> None:
        self.config = engine_config(**options)
        self.config.model_config.hf_text_config.num_attention_heads = heads
        self.heads, self.runner = heads, runner
        self.layer = build_layer(self.config, backend, heads)
        self.builder = build_builder(self.config, self.layer, runner.page_size)

    def metadata(self, *batch: Any, capture: bool = False, **options: Any) -> Any:
        common = self.runner.batch(*batch, **options)
        with set_current_vllm_config(self.config):
            if capture:
                return self.builder.build_for_cudagraph_capture(common)
            return self.builder.build(0, common)

    def run(self, q: torch.Tensor, metadata: Any) -> torch.Tensor:
        return run_layer(self.layer, self.config, q, self.runner.cache, metadata)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Makes a server on a target where this family is ahead of everything up to a batch."""
    entry.vllm.mla()
    flash_attention.calls.clear()

    def made(
        target: Target, heads: int, page_size: int, most: int | None = None, **options: Any
    ) -> Server:
        monkeypatch.setattr(vllm_mla, "detect_target", lambda device: target)
        run_up_to(monkeypatch, most)
        return Server(heads, Runner(page_size), **options)

    return made


@pytest.mark.parametrize(("heads", "page_size"), [(2, 944), (4, 1888), (16, 240), (5, 64)])
def test_decodes_are_those_of_vllms_own_backend(
    serve: Serve, target: Target, heads: int, page_size: int
) -> None:
    """FLASH_ATTN_MLA's mathematics in float64, over ragged lengths and NaN between them."""
    ours = serve(target, heads, page_size)
    lengths = RAGGED if page_size > 200 else (100, 1, 64, 129, 63)
    q = queries(len(lengths), heads)
    out = ours.run(q, ours.metadata(lengths))
    assert not flash_attention.calls
    upstream = Server(heads, ours.runner, FlashAttnMLABackend)
    want = upstream.run(q, upstream.metadata(lengths))
    assert len(flash_attention.calls) == 1
    assert not want.isnan().any()
    for row in range(len(lengths)):
        assert relative_error(out[row], want[row]) < TOLERANCE


def test_decodes_are_those_of_vllms_triton_kernel(serve: Serve, target: Target) -> None:
    """The engine's own kernel, interpreted in float32 over the same cache."""
    ours = serve(target, 4, 944)
    taken: list[tuple[Any, ...]] = []
    forward = ours.layer.impl.forward_mqa

    def kept(q: Any, cache: torch.Tensor, *others: Any) -> Any:
        taken.append((q, *(result := forward(q, cache, *others))))
        return result

    ours.layer.impl.forward_mqa = kept
    metadata = ours.metadata(RAGGED)
    ours.run(queries(len(RAGGED), 4), metadata)
    ((q, out, lse),) = taken
    other = Server(4, ours.runner, TritonMLABackend)
    want, _ = other.layer.impl.forward_mqa(
        tuple(part.float() for part in q),
        ours.runner.cache.float(),
        other.metadata(RAGGED),
        other.layer,
    )
    assert relative_error(out, want) < TOLERANCE
    latent, rope = (part.double() for part in q)
    for row, length in enumerate(RAGGED):
        pages = ours.runner.block_table[row, : -(-length // 944)].long()
        keys = ours.runner.cache[pages].flatten(0, 1)[:length].double()
        s = torch.cat([latent[row], rope[row]], -1) @ keys.T * 192**-0.5
        torch.testing.assert_close(lse[row].double(), s.logsumexp(-1), atol=1e-3, rtol=1e-5)


def test_a_graph_serves_other_requests_than_it_was_captured_with(
    serve: Serve, target: Target
) -> None:
    """Captured with a dummy batch: what it holds is the step's tensors, written anew by planning.

    Padded rows have no tokens: their output is 0.
    """
    ours = serve(target, 4, 944)
    captured = ours.metadata([1] * 4, capture=True).decode.step
    other = Server(4, ours.runner, FlashAttnMLABackend)
    for lengths in ([944, 5, 1003, 2000], [3000], [700, 1500], [1] * 4):
        metadata = ours.metadata(lengths, padded=4)
        assert isinstance(metadata.decode, PlannedDecode)
        latent = queries(4, 4, seed=len(lengths))[..., :128].repeat(1, 1, 4)
        rope = queries(4, 4, seed=7)[..., 128:]
        cache = ours.runner.cache.split((512, 64), -1)
        out, lse = captured.attend(latent, rope, *cache, 192**-0.5)
        real = len(lengths)
        want, _ = other.layer.impl.forward_mqa(
            (latent[:real], rope[:real]),
            ours.runner.cache,
            other.metadata(lengths),
            other.layer,
        )
        assert relative_error(out[:real], want) < TOLERANCE
        assert (out[real:] == 0).all() and (lse[real:] == torch.inf).all()


def test_a_step_runs_in_memory_taken_at_load(serve: Serve) -> None:
    ours = serve(TARGETS["triton"], 4, 944)
    scratch = ours.builder.decoder._scratch
    taken, addresses = scratch.nbytes, scratch.reserve(1, 1, 1)[0].data_ptr()
    ours.run(queries(8, 4), ours.metadata([944, 5, 1003, 2000, 1, 1, 1, 1]))
    assert (scratch.nbytes, scratch.reserve(1, 1, 1)[0].data_ptr()) == (taken, addresses)


@pytest.mark.parametrize("tokens", [2, 4])
def test_drafts_of_one_length_are_served(serve: Serve, target: Target, tokens: int) -> None:
    draft = {**DRAFT, "num_speculative_tokens": tokens - 1}
    ours = serve(target, 4, 240, speculative_config=draft)
    lengths, counts = [100, 300, 243], [tokens] * 3
    q = queries(3 * tokens, 4)
    metadata = ours.metadata(lengths, counts)
    assert metadata.decode.step.plan.query_tokens == tokens
    out = ours.run(q, metadata)
    assert not flash_attention.calls
    upstream = Server(4, ours.runner, FlashAttnMLABackend, speculative_config=draft)
    want = upstream.run(q, upstream.metadata(lengths, counts))
    assert relative_error(out, want) < TOLERANCE


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([100, 300], [1, 40]),  # a decode beside a short piece of a prompt
        ([40], [40]),
        ([100, 300], [2, 2]),  # drafts, without a configuration of them
        ([9, 9, 9], [1, 1, 1]),  # more requests than this family is ahead with
    ],
)
def test_other_steps_are_the_base_classs(
    serve: Serve, lengths: Sequence[int], counts: Sequence[int]
) -> None:
    ours = serve(TARGETS["torch"], 4, 240, most=2)
    metadata = ours.metadata(lengths, counts)
    assert not isinstance(metadata.decode, PlannedDecode)
    out = ours.run(queries(sum(counts), 4), metadata)
    assert len(flash_attention.calls) == 1 and not out.isnan().any()


@pytest.mark.parametrize(
    ("bounds", "num_tokens", "expected"),
    [
        ([0, 1, 2, 3], 3, 1),
        ([0, 1, 2, 2, 2], 4, 1),  # two requests in a graph of four
        ([0, 0, 0], 2, 1),  # none
        ([0, 4, 8, 8], 12, 4),
        ([0, 1, 3], 3, None),
        ([0, 2, 2], 2, None),
        ([0, 4, 6, 6], 12, None),
        ([0, 1, 5], 5, None),
        ([0, 1], 0, None),
    ],
)
def test_which_batches_are_uniform(
    bounds: list[int], num_tokens: int, expected: int | None
) -> None:
    assert _uniform_tokens(bounds, num_tokens) == expected


def test_a_step_that_fails_is_said_and_leaves(serve: Serve, log_lines: list[str]) -> None:
    ours = serve(TARGETS["torch"], 4, 240)
    metadata = ours.metadata([100, 300])
    ours.runner.cache = ours.runner.cache[:, :16]  # of another page size
    with pytest.raises(ValueError, match="cache must have shape"):
        ours.run(queries(2, 4), metadata)
    (line,) = [line for line in log_lines if "failed" in line]
    assert f"the step of MLA layer {ours.layer.layer_name} failed" in line


def test_layers_with_other_heads_do_not_share_a_plan(serve: Serve) -> None:
    ours = serve(TARGETS["torch"], 4, 240)
    other = build_layer(ours.config, SplitKvMLABackend, 2)
    names = [ours.layer.layer_name, other.layer_name]
    with pytest.raises(ValueError, match=r"must have one number of heads, got \[2, 4\]"):
        vllm_mla._heads(ours.config, names)


def test_the_canary_of_the_recall_benchmark_is_planted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `benchmarks.recall_vllm --only mla_canary` plants into a server."""
    ours = serve(TARGETS["torch"], 4, 240)
    metadata = ours.metadata([100, 300])
    assert ours.run(queries(2, 4), metadata).any()
    monkeypatch.setattr(MlaStep, "attend", MlaStep.attend)  # restored after the test
    zero_mla_decodes()
    assert not ours.run(queries(2, 4), metadata).any()


def test_heads_are_those_of_a_rank(serve: Serve) -> None:
    """Kimi's own layer in newer releases counts the heads of all ranks."""
    ours = serve(TARGETS["torch"], 4, 240)
    layer = types.SimpleNamespace(num_heads=32, num_local_heads=4, impl=ours.layer.impl)
    ours.config.compilation_config.static_forward_context["kimi"] = layer
    assert vllm_mla._heads(ours.config, ["kimi", ours.layer.layer_name]) == 4


def test_queries_may_come_in_one_tensor(serve: Serve, target: Target) -> None:
    """As Kimi's own layer hands them over: latent and RoPE parts side by side."""
    ours = serve(target, 4, 944)
    metadata = ours.metadata(RAGGED)
    q = torch.randn(len(RAGGED), 4, 576, generator=torch.Generator().manual_seed(3)).bfloat16()
    arguments = (ours.runner.cache, metadata, ours.layer)
    out, lse = ours.layer.impl.forward_mqa(q, *arguments)
    parts = (q[..., :512].contiguous(), q[..., 512:].contiguous())
    want, want_lse = ours.layer.impl.forward_mqa(parts, *arguments)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_a_call_that_is_not_the_steps_is_refused(serve: Serve) -> None:
    ours = serve(TARGETS["torch"], 4, 240)
    step: MlaStep = ours.metadata([100, 300]).decode.step
    q = torch.zeros(3, 4, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"must have 2 tokens \(1 for each of 2 requests\), got 3"):
        step.attend(*q.split((512, 64), -1), *ours.runner.cache.split((512, 64), -1), 1.0)
