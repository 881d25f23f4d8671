"""A decode step that sglang captures in a CUDA graph: right for every batch that replays it.

sglang's own code makes the metadata: ``init_cuda_graph_state``, then
``init_forward_metadata_out_graph`` of the capture, and of each replay on the view of the batch that
its runner builds. The step is captured after a warm-up, with the runner's dummy batch, and
replayed with requests in other slots, fewer of them than were captured, and eager steps between.

What the host decides in ``sglang_kernel.py`` and ``sglang_layer.py``, a graph keeps. That slots,
rows, lengths, plans and scratch memory may be others is tested here, in test_prefill_graph and in
test_drafts; `DeviceGraph` refuses a value that is read from the device, which falling back on a
``ValueError`` would need. The same in every batch that replays a graph are

- ``replayssm_d``, ``scale``, unknown arguments, ``_has_one_launch``, and whether drafts form a
  tree: they follow from the server's arguments and the model;
- the norm and ``_k3_onorm_consumed``: the model offers its gate in every step or in none, and asks
  for the answer in the same call; ``_k3_deferred_f_b`` is of the model's own code too;
- ``pdl_prefetch_safe=True``: the layer's projections lie between the metadata and the step, in the
  graph too;
- ``is_spec_decode``: of the forward mode, which has graphs of its own;
- snapshots and ``num_state_checkpoints`` of prefills: by whether the bucket has tables for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_kernel
from tests.engines.kda.sglang.device_graph import DeviceGraph
from tests.engines.kda.sglang.harness import LAYERS, SLOTS, Served, on_an_a100
from tests.engines.kda.sglang.test_layer import (
    TOLERANCE,
    check_pools,
    definitions,
    extend_call,
    pools,
    tokens,
)

SIZE = 4  # requests of the captured batch
TRACKED = 11  # the slot that the prefix cache wants a state in


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with on_an_a100(), torch.no_grad():
        yield Served("--attention-backend", "kda")


class DecodeGraph:
    """sglang's decode graph of `SIZE` requests, its buffers and its graph."""

    def __init__(self, served: Served) -> None:
        self.served, self.graph = served, DeviceGraph()
        served.init_graphs(SIZE, SIZE)
        self.x = torch.zeros(SIZE, 256, dtype=torch.bfloat16)
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(SIZE, dtype=torch.int64),
            positions=torch.zeros(SIZE, dtype=torch.int64),
            req_pool_indices=torch.zeros(SIZE, dtype=torch.int64),
            seq_lens=torch.ones(SIZE, dtype=torch.int64),
            seq_lens_cpu=torch.ones(SIZE, dtype=torch.int64),
            encoder_lens=None,
            mamba_track_indices=torch.zeros(SIZE, dtype=torch.int64),
            mamba_track_mask=torch.zeros(SIZE, dtype=torch.bool),
        )

    def capture(self) -> None:
        """As ``DecodeCudaGraphRunner``: the dummy batch is request 0, and warm-ups come first."""
        buffers = self.buffers
        self.served.pool.req_index_to_mamba_index_mapping.zero_()
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=SIZE,
            input_ids=buffers.input_ids,
            req_pool_indices=buffers.req_pool_indices,
            seq_lens=buffers.seq_lens,
            seq_lens_cpu=buffers.seq_lens_cpu,
            out_cache_loc=torch.zeros(SIZE, dtype=torch.int64),
            seq_lens_sum=SIZE,
            positions=buffers.positions,
            mamba_track_indices=buffers.mamba_track_indices,
            mamba_track_mask=buffers.mamba_track_mask,
        )
        self.served.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.served.layers_on(self.x, batch)
        self.outputs = self.graph.record(lambda: self.served.layers_on(self.x, batch))

    def replay(
        self, x: torch.Tensor, slots: Sequence[int], tracked: int | None = None
    ) -> list[torch.Tensor]:
        """One token ``[hidden]`` of each request; the outputs of every layer.

        Requests have rows 1 to N of sglang's pool of requests; row 0 is its padding's.
        """
        number, buffers = len(slots), self.buffers
        batch = self.served.batch(ForwardMode.DECODE, [1] * number, [8] * number, slots)
        mapping = self.served.pool.req_index_to_mamba_index_mapping
        mapping[1 : number + 1] = torch.tensor(slots, dtype=mapping.dtype)
        self.x[:number] = x
        buffers.req_pool_indices.zero_()
        buffers.req_pool_indices[:number] = torch.arange(1, number + 1)
        buffers.seq_lens.fill_(1)
        buffers.seq_lens[:number] = 9
        buffers.seq_lens_cpu.copy_(buffers.seq_lens)
        buffers.mamba_track_mask.zero_()
        buffers.mamba_track_indices.zero_()
        if tracked is not None:
            buffers.mamba_track_mask[tracked] = True
            buffers.mamba_track_indices[tracked] = TRACKED
        view = build_replay_fb_view(
            batch,
            buffers,
            bs=SIZE,
            raw_bs=number,
            num_tokens=SIZE,
            global_num_tokens_cpu=None,
            seq_len_fill_value=1,
            capture_forward_mode=ForwardMode.DECODE,
            is_encoder_decoder=False,
        )
        self.served.backend.init_forward_metadata_out_graph(view)
        self.graph.replay()
        return self.outputs


@pytest.mark.parametrize("one_launch", [True, False])
def test_a_graph_of_decodes_serves_other_requests_than_it_was_captured_with(
    served: Served, monkeypatch: pytest.MonkeyPatch, one_launch: bool
) -> None:
    """With the convolution in the launch, and below sglang's own convolution."""
    if not one_launch:
        monkeypatch.delattr(served.backend.linear_attn_backend, "forward_decode")
    check_replays(served)


def check_replays(served: Served) -> None:
    """Capture with the dummy batch, then serve batches, an eager prefill between them."""
    graph = DecodeGraph(served)
    served.fill_pools(seed=3)
    before = pools(served)
    graph.capture()
    assert graph.graph.kernels.count("decode_step_kernel") == len(LAYERS)
    for layer, kept in enumerate(before):
        for pool, was in zip(served.states(layer), kept, strict=True):
            assert torch.equal(pool[1:], was[1:])  # slot 0 is nobody's
    for step, slots in enumerate(([5, 2, 9], [7], [9, 3, 5, 1], [2, 9])):
        before = pools(served)
        x = tokens(len(slots), seed=20 + step)
        requests = [
            definitions(served, layer, slots, [False] * len(slots)) for layer in range(len(LAYERS))
        ]
        outputs = graph.replay(x, slots)
        for layer, output in enumerate(outputs):
            want = torch.cat([r.run(x[n : n + 1]) for n, r in enumerate(requests[layer])])
            assert relative_error(output[: len(slots)], want) < TOLERANCE
            want_slots = dict(zip(slots, requests[layer], strict=True))
            check_pools(served, layer, want_slots, before[layer])
        eager = served.batch(ForwardMode.EXTEND, [3], [8], [4])
        served.forward(tokens(3, seed=40 + step), eager)


def test_the_prefix_cache_gets_states_of_requests_that_come_later(served: Served) -> None:
    """None is tracked in the capture; then one request's states are copied as they are left."""
    graph = DecodeGraph(served)
    served.fill_pools(seed=5)
    graph.capture()
    before = pools(served)
    graph.replay(tokens(3, seed=6), [5, 2, 9], tracked=1)
    for layer, kept in enumerate(before):
        for pool, was in zip(served.states(layer), kept, strict=True):
            assert torch.equal(pool[TRACKED], pool[2])
            assert not torch.equal(pool[2], was[2])
            others = [slot for slot in range(1, SLOTS + 1) if slot not in (5, 2, 9, TRACKED)]
            assert torch.equal(pool[others], was[others])


def test_a_prefill_in_one_full_graph_is_refused_by_upstream(served: Served) -> None:
    """Its metadata would come from where the decode graph's does, which has no such mode."""
    DecodeGraph(served)
    batch = served.batch(ForwardMode.EXTEND, [3], [0], [4])
    with pytest.raises(ValueError, match="Invalid forward mode"):
        served.backend.linear_attn_backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_a_capture_has_a_plan_of_its_own_without_lengths(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the warm-up before it, over the very tensors, nor its lengths."""
    built: list[Any] = []
    build = sglang_kernel.build_step_plan

    def seen(*args: Any, cu_seqlens_cpu: torch.Tensor | None = None, **given: Any) -> Any:
        built.append(cu_seqlens_cpu)
        return build(*args, cu_seqlens_cpu=cu_seqlens_cpu, **given)

    monkeypatch.setattr(sglang_kernel, "build_step_plan", seen)
    call, inputs = extend_call(served)
    kernel = served.dispatcher.extend_kernel
    kernel.extend(*inputs, **call)
    call["ssm_states"] = served.states(1)[1]
    kernel.extend(*inputs, **call)  # the pass's second layer
    assert [None if x is None else x.tolist() for x in built] == [[0, 2, 5]]
    monkeypatch.setattr(sglang_kernel, "is_capturing", lambda x: True)
    kernel.extend(*inputs, **call)
    assert built[1:] == [None]
