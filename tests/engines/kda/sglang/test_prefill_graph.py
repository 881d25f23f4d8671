"""The prefill that sglang 0.5.23 captures in CUDA graphs, on its static tables, without a graph.

A bucket has more requests than the batch: the rest are empty, with slot -1 and chunk tables that
point past the end. The host knows no lengths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_layer
from tests.engines.kda.sglang import harness
from tests.engines.kda.sglang.test_layer import kernels_of_an_a100, tokens

MODULE = "sglang.srt.layers.attention.linear.kda_prefill_graph"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(MODULE) is None, reason="this sglang runs KDA outside prefill graphs"
)
NEW, SLOTS = [70, 6], [3, 5]


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
        yield harness.Served("--attention-backend", "kda")


def test_a_bucket_with_empty_requests_and_a_tracked_state(served: Any) -> None:
    from sglang.srt.layers.attention.linear import kda_prefill_graph as graph

    served.fill_pools(seed=1)
    conv, states = served.states(0)
    states[SLOTS] = 0
    others = [slot for slot in range(harness.SLOTS + 1) if slot not in (*SLOTS, 8)]
    before = conv.clone(), states.clone()
    x = tokens(sum(NEW), seed=2)
    meta = bucket(graph)
    layer = served.layers[0]
    qkv, beta, gate, _ = layer.forward_qkvbfg_fused(x)

    o = graph.kda_extend_in_graph(
        layer=layer.attn,
        meta=meta,
        conv_pool=conv,
        ssm_states=states,
        kernel_dispatcher=served.dispatcher,
        mixed_qkv=qkv,
        a=gate.unsqueeze(0),
        b=beta.unsqueeze(0),
    )

    norm_gate = layer.forward_qkvbfg_fused(x)[3].unflatten(-1, (-1, 128))
    output = layer.o_proj(layer.o_norm(o, norm_gate).squeeze(0).flatten(-2))[0]
    start = 0
    for length, slot in zip(NEW, SLOTS, strict=True):
        request = harness.Definition(0, torch.zeros(768, 3), torch.zeros(2, 128, 128))
        y = x[start : start + length]
        if slot == 3:
            first = request.run(y[:64])
            assert relative_error(states[8], request.state[0]) < 1e-2
            want = torch.cat([first, request.run(y[64:])])
        else:
            want = request.run(y)
        assert relative_error(output[start : start + length], want) < 2e-2
        assert relative_error(states[slot], request.state[0]) < 1e-2
        start += length
    assert torch.equal(conv[others], before[0][others])
    assert torch.equal(states[others], before[1][others])


def bucket(graph: Any) -> Any:
    """sglang's tables of a bucket of 76 tokens and up to 5 requests, filled with the batch's."""
    meta = graph.KDAPrefillGraphMetadata.allocate(
        num_tokens=sum(NEW),
        max_seqs_cap=5,
        track=True,
        cache_index_dtype=torch.int32,
        device=torch.device("cpu"),
    )
    target = torch.zeros(5, dtype=torch.int64)
    target[0] = 8
    rows = graph.build_track_rows(
        track_mask=[True, False],
        track_seq_lens=NEW,
        extend_seq_lens=NEW,
        extend_prefix_lens=[0, 0],
        state_chunk_size=64,
        cache_chunk_size=64,
        conv_len=3,
        dst=target,
    )
    # `fill`, whose copy to the device wants a GPU's pinned memory
    meta._write_host_tables(lens=torch.tensor(NEW).numpy(), track_rows=rows)
    meta.packed.copy_(torch.from_numpy(meta.host))
    meta.cache_indices[:2] = torch.tensor(SLOTS, dtype=torch.int32)
    meta.track_dst.copy_(target)
    return meta
