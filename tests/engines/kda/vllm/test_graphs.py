"""What a CUDA graph of a KDA layer's step holds: right for every batch that replays it.

Here steps of decodes, which are captured by their own metadata and replayed with the requests that
come, padded with rows of the null block; test_tables.py has steps with prefills.
"""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from backend_core.testing.numerics import relative_error
from tests.engines.kda.vllm.graph import SIZE, Graph
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

TOLERANCE = 8e-3


def test_a_graph_of_decodes_serves_other_requests_than_it_was_captured_with() -> None:
    config = engine_config(flag=True)
    layer = build_layer(config)
    bind_cache(layer, config)
    graph = Graph(layer, config)
    prompts = {slot: hidden(8, seed=slot) for slot in (3, 7, 5)}
    definitions = {slot: Definition(checkpoint_weights(0)) for slot in prompts}
    for slot, prompt in prompts.items():
        definitions[slot].run(prompt)
        table = torch.tensor([[slot, 0, 0, 0]], dtype=torch.int32)
        run_layer(layer, config, prompt, step_metadata(layer, config, (8,), (0,), table))
    kept = [pool.clone() for pool in layer.kv_cache]
    graph.capture()
    assert graph.call[0] == "decode"
    for pool, before in zip(layer.kv_cache, kept, strict=True):
        assert torch.equal(pool[1:], before[1:])
    for slots in ([3, 7, 5], [7], [5, 3]):
        x = hidden(SIZE, seed=sum(slots))
        out = graph.replay(x, graph.builder.build(0, graph.batch(slots)))
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
