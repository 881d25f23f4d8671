"""MLA layers of sglang outside of its large prefill graphs, in the form that their batch takes.

A graph is captured for batches with and without cached prefixes, so sglang captures the absorbed
form of MLA, which serves both, and only the attention itself breaks the graph. Without a prefix the
other form, with keys and values of each head, needs a fraction of the arithmetic. Here the layer as
a whole is the break: its projections run on the step's real tokens, as in a step without graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    context,
    eager_on_graph,
    is_in_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


def break_at_mla(model: torch.nn.Module, tokens: int) -> None:
    """Let graphs of more than ``tokens`` tokens break at each MLA layer of a loaded model."""
    for module in model.modules():
        if isinstance(module, DeepseekV2AttentionMLA) and not module.o_proj.reduce_results:
            module.forward = _Outside(module.forward, tokens)


class _Outside:
    """``forward`` of an MLA layer.

    Attributes:
        upstream: the layer's own; its output is not reduced over the ranks.
    """

    def __init__(self, upstream: Any, tokens: int) -> None:
        self.upstream, self.tokens = upstream, tokens

    def __call__(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        zero_allocator: Any,
        **options: Any,
    ) -> Any:
        """Run as upstream does: ``hidden_states [T, C]``, whose last may be a graph's padding."""
        if (
            not is_in_breakable_cuda_graph()
            or hidden_states.shape[0] <= self.tokens
            or any(value is not None and value is not False for value in options.values())
        ):
            return self.upstream(
                positions=positions,
                hidden_states=hidden_states,
                forward_batch=forward_batch,
                zero_allocator=zero_allocator,
                **options,
            )
        out = torch.empty_like(hidden_states)  # in the graph's memory
        self.run(hidden_states, out, zero_allocator)
        return out

    @eager_on_graph  # type: ignore[untyped-decorator]
    def run(self, hidden_states: torch.Tensor, out: torch.Tensor, zero_allocator: Any) -> None:
        """The layer on the real tokens of the step that runs now."""
        batch = get_forward_batch()
        tokens = batch.global_num_token_non_padded_cpu
        with _outside_of_graphs(), _real_tokens(batch, tokens):
            result = self.upstream(
                positions=batch.positions,
                hidden_states=hidden_states[:tokens],
                forward_batch=batch,
                zero_allocator=zero_allocator,
            )
        out[:tokens].copy_(result)
        out[tokens:].zero_()


@contextlib.contextmanager
def _outside_of_graphs() -> Iterator[None]:
    """sglang chooses the form of MLA, and launches its attention, as in a step without graphs."""
    context._in_breakable_cuda_graph = False
    try:
        yield
    finally:
        context._in_breakable_cuda_graph = True


@contextlib.contextmanager
def _real_tokens(batch: Any, tokens: int) -> Iterator[None]:
    """A ``ForwardBatch`` whose fields of each token end with the real ones."""
    padded = batch.out_cache_loc, batch.positions
    batch.out_cache_loc, batch.positions = (x[:tokens] for x in padded)
    try:
        yield
    finally:
        batch.out_cache_loc, batch.positions = padded
