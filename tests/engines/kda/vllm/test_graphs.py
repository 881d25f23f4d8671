"""What a CUDA graph of a KDA layer's step holds: right for every batch that replays it.

Here steps of decodes, which are captured by their own metadata and replayed with the requests that
come, padded with rows of the null block; test_tables.py has steps with prefills.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from backend_core.testing.numerics import relative_error
from kda_backend import layer as operators
from kda_backend.engines import vllm_run
from kda_backend.engines.vllm import register
from tests.engines.kda.vllm.harness import (
    SLOTS,
    bind_cache,
    build_layer,
    engine_config,
    hidden,
    run_layer,
    step_metadata,
)
from tests.engines.kda.weights import Definition, checkpoint_weights
from tests.engines.vllm_process import common_metadata

TOLERANCE = 8e-3
SIZE = 4  # requests of the captured batch


class Graph:
    """A captured decode step: recorded calls on buffers that the next batch is written into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        register()
        self.config = engine_config(flag=True)
        compilation = self.config.compilation_config
        monkeypatch.setattr(compilation, "cudagraph_mode", CUDAGraphMode.FULL_DECODE_ONLY)
        monkeypatch.setattr(compilation, "max_cudagraph_capture_size", SIZE)
        self.layer = build_layer(self.config)
        bind_cache(self.layer, self.config)
        spec = MambaSpec(
            block_size=self.config.model_config.max_model_len,
            shapes=tuple(self.layer.get_state_shape()),
            dtypes=tuple(self.layer.get_state_dtype()),
            mamba_type=self.layer.mamba_type,
            mamba_cache_mode=self.config.cache_config.mamba_cache_mode,
        )
        with set_current_vllm_config(self.config):
            self.builder = GDNAttentionMetadataBuilder(
                spec, [self.layer.prefix], self.config, torch.device("cpu")
            )
        self.x = torch.zeros(SIZE, 256, dtype=torch.bfloat16)
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def metadata(self, slots: list[int], *, capture: bool = False) -> Any:
        """The builder's, of one token of each request; padded as the runner pads a batch."""
        number = len(slots)
        bounds = torch.arange(SIZE + 1, dtype=torch.int32).clamp(max=number)
        table = torch.zeros(SIZE, 4, dtype=torch.int32)
        table[:number, 0] = torch.tensor(slots, dtype=torch.int32)
        lengths = torch.full((SIZE,), 9, dtype=torch.int32)
        slots = torch.zeros(SIZE, dtype=torch.int64)
        is_prefilling = torch.zeros(SIZE, dtype=torch.bool)
        common = common_metadata(bounds, lengths, table, slots, is_prefilling=is_prefilling)
        if capture:
            return self.builder.build_for_cudagraph_capture(common)
        return self.builder.build(0, common)

    def capture(self, metadata: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("decode", "prefill", "verify"):
                patch.setattr(operators, name, self._recorded(getattr(operators, name)))
            run_layer(self.layer, self.config, self.x, metadata)

    def _recorded(self, operator: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self.calls.append((operator, args, options))
            operator(*args, **options)

        return call

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        """The projections and the norm of a graph come to the same kernels: run them anew."""
        (operator, args, options) = self.calls[0]
        own: list[tuple[Any, ...]] = []

        def redirected(*given: Any, **_: Any) -> None:
            own.append(given)
            # weights, plan and this batch's tokens; the graph's pools and indices
            operator(*args[:2], given[2], *args[3:], **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operators, operator.__name__, redirected)
            out = run_layer(self.layer, self.config, x, self.last)
        assert len(own) == 1
        return out


def test_a_graph_of_decodes_serves_other_requests_than_it_was_captured_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Graph(monkeypatch)
    layer, config = graph.layer, graph.config
    prompts = {slot: hidden(8, seed=slot) for slot in (3, 7, 5)}
    definitions = {slot: Definition(checkpoint_weights(0)) for slot in prompts}
    for slot, prompt in prompts.items():
        definitions[slot].run(prompt)
        table = torch.tensor([[slot, 0, 0, 0]], dtype=torch.int32)
        run_layer(layer, config, prompt, step_metadata(layer, config, (8,), (0,), table))
    kept = [pool.clone() for pool in layer.kv_cache]
    graph.capture(graph.metadata([0] * SIZE, capture=True))  # dummy requests: the null block's
    assert [call[0].__name__ for call in graph.calls] == ["decode"]
    for pool, before in zip(layer.kv_cache, kept, strict=True):
        assert torch.equal(pool[1:], before[1:])
    for slots in ([3, 7, 5], [7], [5, 3]):
        x = hidden(SIZE, seed=sum(slots))
        graph.last = graph.metadata(slots)
        out = graph.replay(x)
        for row, slot in enumerate(slots):
            want = definitions[slot].run(x[row : row + 1])
            assert relative_error(out[row : row + 1], want) < TOLERANCE
            assert relative_error(layer.kv_cache[1][slot], definitions[slot].state[0]) < TOLERANCE
    others = [slot for slot in range(1, SLOTS) if slot not in prompts]
    for pool, before in zip(layer.kv_cache, kept, strict=True):
        assert torch.equal(pool[others], before[others])


def test_graphs_without_breaks_hold_decodes_alone() -> None:
    """What keeps KDA's other host decisions (prefill or draft, who starts anew) out of them."""
    support = GDNAttentionMetadataBuilder._cudagraph_support
    assert support is AttentionCGSupport.UNIFORM_BATCH  # no FULL graph of mixed batches


def test_indices_that_are_not_the_builders_own_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a step plan with a copy, which no later batch is written into."""
    build = vllm_run.build_step

    def copied(*args: Any) -> Any:
        step = build(*args)
        if step.decode is None:
            return step
        decode = replace(step.decode, state_indices=step.decode.state_indices.clone())
        return replace(step, decode=decode)

    monkeypatch.setattr(vllm_run, "build_step", copied)
    with pytest.raises(AssertionError):
        test_a_graph_of_decodes_serves_other_requests_than_it_was_captured_with(monkeypatch)
