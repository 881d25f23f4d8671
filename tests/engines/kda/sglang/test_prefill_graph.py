"""The prefill that sglang 0.5.23 captures in CUDA graphs, on its static tables.

A bucket has more requests than the batch: the rest are empty, with slot -1 and chunk tables that
point past the end. The host knows no lengths. It is captured with sglang's dummy request and
replayed with other batches, between which sglang writes the tables anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_kernel
from kda_backend.engines.sglang_kernel import KdaKernel
from kda_backend.step_plan import StepPlan, build_chunk_table, build_step_plan
from tests.engines.kda.sglang import harness
from tests.engines.kda.sglang.device_graph import DeviceGraph
from tests.engines.kda.sglang.test_layer import (
    STATE_TOLERANCE,
    TOLERANCE,
    definitions,
    fresh_slots,
    pools,
    tokens,
)
from tests.engines.kda.weights import Definition

MODULE = "sglang.srt.layers.attention.linear.kda_prefill_graph"
NEW, SLOTS = [70, 6], [3, 5]


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with harness.on_an_a100(), torch.no_grad():
        yield harness.Served("--attention-backend", "kda")


def test_a_refusal_in_a_bucket_tells_upstream_what_beta_is(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: our operator refuses. sglang says that Kimi-Linear's logits are step sizes there,
    and a graph would keep what upstream's kernel makes of that."""
    from sglang.srt.layers.attention.linear import kda_prefill_graph as graph

    given: dict[str, Any] = {}

    def upstream(self: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, **call: Any) -> Any:
        given.update(call, beta=beta)
        return torch.zeros_like(v)

    def refuses(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(sglang_kernel.TritonKDAKernel, "extend", upstream)
    monkeypatch.setattr(KdaKernel, "prefill", refuses)
    conv, states = served.states(0)
    layer = served.layers[0]
    qkv, beta, gate, _ = layer.forward_qkvbfg_fused(tokens(sum(NEW), seed=2))
    graph.kda_extend_in_graph(
        layer=layer.attn,
        meta=bucket(graph),
        conv_pool=conv,
        ssm_states=states,
        kernel_dispatcher=served.dispatcher,
        mixed_qkv=qkv,
        a=gate.unsqueeze(0),
        b=beta.unsqueeze(0),
    )
    assert given["beta_is_raw"]
    assert torch.equal(given["beta"], beta.unsqueeze(0))


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


BUCKET = 76  # tokens
# tokens of each request, tokens before them, slots, and (request, slot) of states to keep
Step = tuple[list[int], list[int], list[int], list[tuple[int, int]]]
STEPS: list[Step] = [
    ([70, 6], [0, 0], [3, 5], [(0, 8)]),  # between two chunks
    ([9], [70], [3], []),
    ([1, 64, 3], [5, 0, 6], [7, 2, 5], [(1, 10)]),  # at a chunk's end
]


class PrefillGraph:
    """A bucket of `BUCKET` tokens and up to 5 requests, captured with one request in slot 0."""

    def __init__(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.layers.attention.linear import kda_prefill_graph as graph

        self.served, self.graph = served, DeviceGraph()
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)  # which asks for a GPU
        self.meta = graph.KDAPrefillGraphMetadata.allocate(
            num_tokens=BUCKET,
            max_seqs_cap=5,
            track=True,
            cache_index_dtype=torch.int32,
            device=torch.device("cpu"),
        )
        self.x = torch.zeros(BUCKET, 256, dtype=torch.bfloat16)
        batch = self.prepared(([BUCKET], [0], [0], []))

        def run_once() -> list[torch.Tensor]:
            with forward_context(ForwardContext(attn_backend=served.backend)):
                return [layer(self.x, batch.positions, batch, None) for layer in served.layers]

        run_once()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sglang_kernel, "is_capturing", lambda x: True)
            self.outputs = self.graph.record(run_once)

    def prepared(self, step: Step) -> Any:
        """A batch, its tables written by sglang."""
        new, prefix, slots, tracked = step
        batch = self.served.batch(ForwardMode.EXTEND, new, prefix, slots, tracked=tracked)
        linear = self.served.backend.linear_attn_backend
        linear.refresh_prefill_graph_metadata(self.meta, batch)
        return batch

    def replay(self, x: torch.Tensor, step: Step) -> list[torch.Tensor]:
        self.prepared(step)
        self.x[: len(x)] = x
        self.graph.replay()
        return self.outputs


def plan_of_a_gpu(
    cu_seqlens: torch.Tensor, num_tokens: int, *, chunk_table: bool, **known: Any
) -> StepPlan:
    """`build_step_plan` of offsets that are not in host memory."""
    assert chunk_table
    plan = build_step_plan(cu_seqlens.to("meta"), num_tokens, chunk_table=False, **known)
    table = build_chunk_table(cu_seqlens, plan.num_chunks)
    return replace(plan, cu_seqlens=cu_seqlens, chunk_table=table)


def check_step(
    served: Any,
    layer: int,
    step: Step,
    x: torch.Tensor,
    output: torch.Tensor,
    requests: list[Definition],
    before: list[torch.Tensor],
) -> None:
    """Outputs, both states and what is kept, by the definition; every other slot bit for bit."""
    new, _, slots, tracked = step
    conv, states = served.states(layer)
    kept = dict(tracked)
    want = []
    for n, (request, y) in enumerate(zip(requests, x.split(new), strict=True)):
        whole = new[n] // 64 * 64
        if whole:
            want.append(request.run(y[:whole]))
        if n in kept:
            assert relative_error(states[kept[n]], request.state[0]) < STATE_TOLERANCE
        if whole < new[n]:
            want.append(request.run(y[whole:]))
        assert relative_error(states[slots[n]], request.state[0]) < STATE_TOLERANCE
        assert relative_error(conv[slots[n]].T, request.window) < STATE_TOLERANCE
    assert relative_error(output[: len(x)], torch.cat(want)) < TOLERANCE
    assert not output[len(x) :].any()
    given = {*slots, *kept.values()}
    others = [slot for slot in range(1, harness.SLOTS + 1) if slot not in given]
    for pool, was in zip((conv, states), before, strict=True):
        assert torch.equal(pool[others], was[others])


def test_a_bucket_serves_other_batches_than_it_was_captured_with(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests and fewer, with a prefix and without, with states to keep and without."""
    monkeypatch.setattr(sglang_kernel, "build_step_plan", plan_of_a_gpu)
    served.fill_pools(seed=11)
    graph = PrefillGraph(served, monkeypatch)
    for number, step in enumerate(STEPS):
        new, prefix, slots, _ = step
        fresh = fresh_slots(served, slots, prefix)
        requests = [definitions(served, n, slots, fresh) for n in range(len(harness.LAYERS))]
        before = pools(served)
        x = tokens(sum(new), seed=30 + number)
        outputs = graph.replay(x, step)
        for layer, output in enumerate(outputs):
            check_step(served, layer, step, x, output, requests[layer], before[layer])
        # the server goes on with a step that is no graph's
        served.forward(
            tokens(2, seed=50 + number), served.batch(ForwardMode.EXTEND, [2], [4], [11])
        )
