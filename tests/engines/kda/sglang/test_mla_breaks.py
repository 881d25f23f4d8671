"""MLA layers outside of large prefill graphs: what they are given, and what the graph reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    enable_breakable_cuda_graph,
    is_in_breakable_cuda_graph,
)

from kda_backend.engines import sglang_mla_breaks

TOKENS, BUCKET, REAL = 16, 24, 21


class Layer(torch.nn.Module):
    """Doubles its input, and keeps what it was called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(sglang_mla_breaks, "DeepseekV2AttentionMLA", Layer)
        self.o_proj = SimpleNamespace(reduce_results=False)
        self.seen: list[tuple[int, int, int, bool]] = []

    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, zero_allocator: Any
    ) -> torch.Tensor:
        slots = len(forward_batch.out_cache_loc)
        inside = is_in_breakable_cuda_graph()
        self.seen.append((len(positions), len(hidden_states), slots, inside))
        return 2 * hidden_states


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    found = Layer(monkeypatch)
    sglang_mla_breaks.break_at_mla(torch.nn.ModuleList([found]), TOKENS)
    return found


def run(layer: Layer, rows: int, batch: Any) -> torch.Tensor:
    x = torch.arange(1.0, 1.0 + rows)[:, None].expand(rows, 3).contiguous()
    out: torch.Tensor = layer(
        positions=torch.arange(rows), hidden_states=x, forward_batch=batch, zero_allocator=None
    )
    return out


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The step that runs now, padded to a bucket."""
    found = SimpleNamespace(
        global_num_token_non_padded_cpu=REAL,
        out_cache_loc=torch.arange(BUCKET),
        positions=torch.arange(BUCKET),
    )
    monkeypatch.setattr(sglang_mla_breaks, "get_forward_batch", lambda: found)
    return found


def test_a_large_graph_gives_the_layer_its_real_tokens_as_outside_of_graphs(
    layer: Layer, batch: Any
) -> None:
    with enable_breakable_cuda_graph():
        out = run(layer, BUCKET, SimpleNamespace())  # the batch of the capture is not the live one
        assert is_in_breakable_cuda_graph()
    assert layer.seen == [(REAL, REAL, REAL, False)]
    assert torch.equal(out[:REAL, 0], 2 * torch.arange(1.0, 1.0 + REAL))
    assert not out[REAL:].any()
    assert len(batch.out_cache_loc) == len(batch.positions) == BUCKET


def test_small_graphs_and_steps_without_graphs_stay_sglangs(layer: Layer, batch: Any) -> None:
    with enable_breakable_cuda_graph():
        run(layer, TOKENS, batch)
    run(layer, BUCKET, batch)
    assert layer.seen == [(TOKENS, TOKENS, BUCKET, True), (BUCKET, BUCKET, BUCKET, False)]


def test_a_failing_layer_leaves_the_step_as_it_was(
    layer: Layer, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(layer.forward, "upstream", fails)
    with pytest.raises(RuntimeError, match="planted"), enable_breakable_cuda_graph():
        run(layer, BUCKET, batch)
    assert len(batch.out_cache_loc) == len(batch.positions) == BUCKET
    assert not is_in_breakable_cuda_graph()


def test_a_layer_that_reduces_its_output_stays_in_the_graph(
    monkeypatch: pytest.MonkeyPatch, batch: Any
) -> None:
    """Outside, its all-reduce would not run in sglang's order of a capture."""
    layer = Layer(monkeypatch)
    layer.o_proj.reduce_results = True
    sglang_mla_breaks.break_at_mla(torch.nn.ModuleList([layer]), TOKENS)
    with enable_breakable_cuda_graph():
        run(layer, BUCKET, batch)
    assert layer.seen == [(BUCKET, BUCKET, BUCKET, True)]
