"""The prefill that sglang 0.5.23 captures in CUDA graphs, on its static tables.

A bucket has more requests than the batch: the rest are empty, with slot -1 and chunk tables that
point past the end. The host knows no lengths. It is captured with sglang's dummy request and
replayed with other batches, between which sglang writes the tables anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_kernel
from kda_backend.engines.sglang_kernel import KdaKernel
from tests.engines.kda.sglang import harness
from tests.engines.kda.sglang.device_graph import DeviceGraph, plan_of_a_gpu
from tests.engines.kda.sglang.test_layer import (
    STATE_TOLERANCE,
    TOLERANCE,
    definitions,
    fresh_slots,
    pools,
    tokens,
)
from tests.engines.kda.weights import Definition


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with harness.on_an_a100(), torch.no_grad():
        yield harness.Served("--attention-backend", "kda")


BUCKET = 76  # tokens
# tokens of each request, tokens before them, slots, and (request, slot) of states to keep
Step = tuple[list[int], list[int], list[int], list[tuple[int, int]]]
STEPS: list[Step] = [
    ([70, 6], [0, 0], [3, 5], [(0, 8)]),  # between two chunks
    ([9], [70], [3], []),
    ([1, 64, 3], [5, 0, 6], [7, 2, 5], [(1, 10)]),  # at a chunk's end
]


class Bucket:
    """sglang's tables of a bucket of `BUCKET` tokens and up to 5 requests."""

    def __init__(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.layers.attention.linear import kda_prefill_graph as graph

        self.served = served
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)  # which asks for a GPU
        self.meta = graph.KDAPrefillGraphMetadata.allocate(
            num_tokens=BUCKET,
            max_seqs_cap=5,
            track=True,
            cache_index_dtype=torch.int32,
            device=torch.device("cpu"),
        )

    def prepared(self, step: Step) -> Any:
        """A batch, its tables written by sglang."""
        new, prefix, slots, tracked = step
        batch = self.served.batch(ForwardMode.EXTEND, new, prefix, slots, tracked=tracked)
        linear = self.served.backend.linear_attn_backend
        linear.refresh_prefill_graph_metadata(self.meta, batch)
        return batch


class PrefillGraph(Bucket):
    """Captured with one request in slot 0."""

    def __init__(self, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(served, monkeypatch)
        self.graph, self.x = DeviceGraph(), torch.zeros(BUCKET, 256, dtype=torch.bfloat16)
        batch = self.prepared(([BUCKET], [0], [0], []))
        served.layers_on(self.x, batch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sglang_kernel, "is_capturing", lambda x: True)
            self.outputs = self.graph.record(lambda: served.layers_on(self.x, batch))

    def replay(self, x: torch.Tensor, step: Step) -> list[torch.Tensor]:
        self.prepared(step)
        self.x[: len(x)] = x
        self.graph.replay()
        return self.outputs


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


def test_a_refusal_in_a_bucket_tells_upstream_what_beta_is(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: our operator refuses. sglang says that Kimi-Linear's logits are step sizes there,
    and a graph would keep what upstream's kernel makes of that."""
    given: list[Any] = []

    def refuses(self: Any, selection: Any, q: Any, k: Any, v: Any, *rest: Any, **_: Any) -> None:
        given.extend(rest)
        raise ValueError("planted")

    def upstream(self: Any, q: Any, k: Any, v: Any, *rest: Any, **call: Any) -> Any:
        assert call["beta_is_raw"] and all(x is y for x, y in zip(rest, given, strict=True))
        given.clear()
        return torch.zeros_like(v)

    monkeypatch.setattr(sglang_kernel.TritonKDAKernel, "extend", upstream)
    monkeypatch.setattr(KdaKernel, "prefill", refuses)
    served.layers_on(tokens(BUCKET, seed=2), Bucket(served, monkeypatch).prepared(STEPS[0]))
    assert not given
