"""What a CUDA graph of a compressor's step holds: right for every batch that replays it.

vLLM captures with dummy batches and replays with others. The capture is its own: dummy batch,
buffers and metadata as Model Runner V2 makes them. A graph keeps launches with the addresses of
their arguments, so here it is the recorded calls on tensors that the next batch is written into.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from backend_core.engines import entry
from dsv4_backend import PagedPrefill
from dsv4_backend.engines import vllm_compressor
from tests.dsv4.cases import make_history
from tests.engines.dsv4.vllm.harness import Step, build, engine_config, rotary
from tests.engines.dsv4.vllm.test_compressor import check
from tests.engines.vllm_process import builder_of, common_metadata, forward_pass

entry.vllm.dsv4()
TOKENS = 12


class Graph:
    """One compressor, the runner's persistent buffers, and what a capture records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        self.monkeypatch, self.max_num_seqs = monkeypatch, max_num_seqs
        self.config = engine_config(flag=True)
        self.step = Step(build(self.config, "indexer_fp8", 4), "indexer_fp8", [TOKENS, TOKENS])
        self.compressor = self.step.compressor
        self.buffers = InputBuffers(max_num_seqs, 64, torch.device("cpu"))
        self.state_slots = torch.full((TOKENS,), -1, dtype=torch.int64)
        self.slots = torch.full((TOKENS,), -1, dtype=torch.int64)
        self.records = types.SimpleNamespace(slot_mapping=self.slots)
        self.block_table = torch.zeros(max_num_seqs, 8, dtype=torch.int32)
        self.x = torch.zeros(TOKENS, self.step.layer.spec.row_width)
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []
        self.builder = builder_of(self.compressor.state_cache, self.config)

    def dummy_metadata(self, *, full: bool, max_query_len: int | None) -> Any:
        """As ``prepare_inputs_to_capture`` and ``prepare_attn`` make it."""
        from vllm.v1.worker.gpu.input_batch import InputBatch

        number = min(TOKENS, self.max_num_seqs)
        dummy = InputBatch.make_dummy(number, TOKENS, self.buffers)
        common = common_metadata(
            dummy.query_start_loc,
            dummy.seq_lens,
            self.block_table[:number],
            self.state_slots,
            max_query_len=max_query_len or int(dummy.num_scheduled_tokens.max()),
            max_seq_len=1024,
        )
        if full:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def run(self, metadata: Any) -> None:
        attn_metadata = {self.compressor.state_cache.prefix: metadata, "layer": self.records}
        with forward_pass(self.config, attn_metadata, TOKENS):
            self.compressor(self.x, self.buffers.positions[:TOKENS], rotary(4))

    def capture(self, metadata: Any) -> str:
        """Record a step of the compressor on the dummy batch; returns the kind of its plan."""

        def recorded(operator: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                result = operator(*args, **options)
                self.calls.append((operator, args, result))
                return result

            return call

        with self.monkeypatch.context() as patch:
            for name in ("compress_decode_", "compress_prefill_", "window_ends"):
                patch.setattr(vllm_compressor, name, recorded(getattr(vllm_compressor, name)))
            patch.setattr(vllm_compressor, "is_capturing", lambda device: True)
            self.run(metadata)
        return type(self.calls[-1][1][-1]).__name__

    def replay(self, histories: list[torch.Tensor], chunks: list[tuple[int, int, int]]) -> None:
        """What the runner writes for a batch of as many tokens, then the recorded launches."""
        plan = self.step.caches.prefill_plan(chunks)
        assert isinstance(plan, PagedPrefill)
        tokens = plan.num_tokens
        self.buffers.positions[:tokens] = plan.positions
        self.state_slots.fill_(-1)[:tokens] = plan.state_slots
        self.slots[:tokens] = plan.slots  # behind them lie those of an earlier batch
        rows, width = plan.block_table.shape
        self.block_table[:rows, :width] = plan.block_table
        self.builder.token_to_req_indices[:tokens] = plan.requests
        bounds = self.buffers.query_start_loc
        bounds[: len(chunks) + 1] = plan.query_starts
        bounds[len(chunks) + 1 :] = tokens
        self.x[:tokens] = torch.cat([histories[r][a:b] for r, a, b in chunks]).float()
        for operator, args, result in self.calls:
            again = operator(*args)
            if isinstance(result, torch.Tensor):
                result.copy_(again)  # a graph writes where it wrote before


@pytest.fixture(params=[1024, 4])
def graph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """With more requests than tokens the dummy batch has a token each, else several."""
    return Graph(monkeypatch, request.param)


MIXED = [[(0, 0, 9), (1, 0, 3)], [(0, 9, 10), (1, 3, 12)], [(0, 10, 12)]]


def check_replays(graph: Graph) -> None:
    histories = [make_history(graph.step.layer.spec, TOKENS, seed) for seed in (0, 1)]
    for chunks in MIXED:
        graph.replay(histories, chunks)
    check(graph.step, histories)


@pytest.mark.parametrize("warm_run", [False, True])
def test_a_piecewise_graph_serves_any_batch(graph: Graph, warm_run: bool) -> None:
    """``warm_run``: with VLLM_USE_BREAKABLE_CUDAGRAPH=0 the run before has the same metadata."""
    metadata = graph.dummy_metadata(full=False, max_query_len=None)
    if warm_run:
        graph.run(metadata)
    assert graph.capture(metadata) == "PagedPrefill"
    assert graph.calls[0][0].__name__ == "window_ends"  # derived inside of the graph
    check_replays(graph)


def test_a_full_graph_of_mixed_batches_serves_any_batch(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilation = graph.config.compilation_config
    monkeypatch.setattr(compilation, "cudagraph_mode", CUDAGraphMode.FULL)
    metadata = graph.dummy_metadata(full=True, max_query_len=None)
    assert graph.capture(metadata) == "PagedPrefill"
    check_replays(graph)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_a_full_graph_of_decodes_holds_the_decode_step(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    graph = Graph(monkeypatch, 1024)
    compilation = graph.config.compilation_config
    with monkeypatch.context() as patch:
        patch.setattr(compilation, "cudagraph_mode", CUDAGraphMode[mode])
        metadata = graph.dummy_metadata(full=True, max_query_len=1)
    assert graph.capture(metadata) == "PagedDecode"
    histories = [make_history(graph.step.layer.spec, TOKENS, seed) for seed in (0, 1)]
    for token in range(TOKENS):
        graph.replay(histories, [(0, token, token + 1), (1, token, token + 1)])
    check(graph.step, histories)


def test_a_full_graph_of_decodes_verifies_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens per request, as with two drafts; rejected ones are written over."""
    graph = Graph(monkeypatch, 4)
    metadata = graph.dummy_metadata(full=True, max_query_len=3)
    assert metadata.max_query_len == 3 and metadata.replays_decodes_alone
    assert graph.capture(metadata) == "PagedPrefill"
    assert graph.calls[0][0].__name__ == "window_ends"  # derived inside of the graph
    histories = [make_history(graph.step.layer.spec, TOKENS, seed) for seed in (0, 1)]
    spoiled = [make_history(graph.step.layer.spec, TOKENS, seed) for seed in (2, 3)]
    places = [0, 0]
    for accepted in [(0, 2), (1, 0), (0, 1), (2, 0), (1, 1)]:
        drafted = []
        for r, place in enumerate(places):
            right = place + 1 + accepted[r]
            drafted.append(torch.cat([histories[r][:right], spoiled[r][right:]]))
        graph.replay(drafted, [(r, a, a + 3) for r, a in enumerate(places)])
        places = [place + 1 + n for place, n in zip(places, accepted, strict=True)]
    assert places == [TOKENS - 3, TOKENS - 3]
    graph.replay(histories, [(r, a, TOKENS) for r, a in enumerate(places)])  # all are accepted
    check(graph.step, histories)
