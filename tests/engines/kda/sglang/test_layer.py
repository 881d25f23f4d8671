"""sglang's KDA layers on this backend: outputs, pool slots and tracked states, by the definition.

Everything around the kernels is sglang's: projections, convolution of a prefill, metadata, pools,
tracking, norm. The paths are the torch one, and the Triton kernels under the interpreter.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from backend_core.strict import FallbackError
from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_kernel, sglang_layer
from kda_backend.engines.prefill_calls import divided
from kda_backend.selection import KdaShape
from tests.engines.kda.sglang.harness import LAYERS, SLOTS, Served, on_an_a100
from tests.engines.kda.weights import Definition

HIDDEN = 256
# activations are bf16 between the projections, the convolution and the kernels
TOLERANCE, STATE_TOLERANCE = 2e-2, 1e-2


@pytest.fixture(scope="module", params=["torch", "triton"])
def served(request: pytest.FixtureRequest) -> Any:
    """A server with the flag; ``triton``: with the kernels that an A100's table chooses."""
    kernels = on_an_a100() if request.param == "triton" else contextlib.nullcontext()
    with kernels, torch.no_grad():
        yield Served("--attention-backend", "kda")


def tokens(number: int, seed: int) -> torch.Tensor:
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def definitions(served: Any, layer: int, slots: list[int], fresh: list[bool]) -> list[Definition]:
    """The requests as they lie in the pools; a fresh one starts from nothing."""
    conv, states = served.states(layer)
    return [
        served.definition_of(LAYERS[layer], None if new else conv[slot].T, states[slot])
        for slot, new in zip(slots, fresh, strict=True)
    ]


def fresh_slots(served: Any, slots: list[int], prefix: list[int]) -> list[bool]:
    """sglang clears a new request's state when it gives out the slot."""
    fresh = [n == 0 for n in prefix]
    for layer in range(len(LAYERS)):
        for slot, new in zip(slots, fresh, strict=True):
            if new:
                served.states(layer)[1][slot] = 0
    return fresh


def test_prefill_of_a_ragged_batch(served: Any) -> None:
    """New requests and requests with a prefix; no slot but theirs is touched."""
    new, prefix, slots = [70, 1, 5], [0, 64, 3], [3, 1, 7]
    served.fill_pools(seed=1)
    fresh = fresh_slots(served, slots, prefix)
    x = tokens(sum(new), seed=2)
    requests = [definitions(served, layer, slots, fresh) for layer in range(len(LAYERS))]
    before = pools(served)

    outputs = served.forward(x, served.batch(ForwardMode.EXTEND, new, prefix, slots))

    for layer, output in enumerate(outputs):
        want = torch.cat([r.run(y) for r, y in zip(requests[layer], x.split(new), strict=True)])
        assert relative_error(output, want) < TOLERANCE
        check_pools(served, layer, dict(zip(slots, requests[layer], strict=True)), before[layer])


def test_decode_with_padded_requests(served: Any) -> None:
    """The convolution is in the launch; rows of -1 or slot 0 give zeros and touch nothing."""
    slots = [5, 2, 9]
    served.fill_pools(seed=3)
    x = tokens(5, seed=4)
    requests = [definitions(served, layer, slots, [False] * 3) for layer in range(len(LAYERS))]
    before = pools(served)
    batch = served.batch(ForwardMode.DECODE, [1] * 5, [9] * 5, [*slots, 0, 0])
    batch._original_batch_size = 3  # the rest fills a CUDA graph's batch

    outputs = served.forward(x, batch)

    indices = served.backend.linear_attn_backend.forward_metadata.mamba_cache_indices
    assert indices.tolist() in ([*slots, -1, -1], [*slots, 0, 0])
    for layer, output in enumerate(outputs):
        want = torch.cat([r.run(x[n : n + 1]) for n, r in enumerate(requests[layer])])
        assert relative_error(output[:3], want) < TOLERANCE
        assert not output[3:].any()
        check_pools(served, layer, dict(zip(slots, requests[layer], strict=True)), before[layer])


def test_the_prefix_cache_gets_the_state_at_the_last_full_chunk(served: Any) -> None:
    """Between chunks a state of the prefill itself, at a chunk's end the final one."""
    new, prefix, slots = [70, 64, 20], [0, 64, 0], [3, 1, 5]
    served.fill_pools(seed=7)
    fresh = fresh_slots(served, slots, prefix)
    x = tokens(sum(new), seed=8)
    requests = [definitions(served, layer, slots, fresh) for layer in range(len(LAYERS))]
    batch = served.batch(ForwardMode.EXTEND, new, prefix, slots, tracked=[(0, 8), (1, 9)])

    served.forward(x, batch)

    kernel = served.dispatcher.extend_kernel
    for layer in range(len(LAYERS)):
        _, states = served.states(layer)
        first, second, _ = requests[layer]
        first.run(x[:64])
        assert relative_error(states[8], first.state[0]) < STATE_TOLERANCE
        assert not torch.equal(states[8], states[8].bfloat16().float())  # a copy in fp32
        second.run(x[70:134])
        assert torch.equal(states[9], states[1])
        assert relative_error(states[9], second.state[0]) < STATE_TOLERANCE
    assert kernel.supports_track_state_snapshot


@pytest.mark.parametrize(
    ("served", "padding"), [("torch", 0), ("torch", 6), ("triton", 6)], indirect=["served"]
)
def test_a_step_of_many_chunks_is_several_calls(
    served: Any, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, states and what the prefix cache is to keep are those of one call. With attention in
    data parallel a step has rows of nobody behind its requests."""
    new, prefix, slots = [1, 66, 3], [9, 0, 0], [3, 1, 7]
    kernel, x = served.dispatcher.extend_kernel, tokens(sum(new) + padding, seed=15)
    found = []
    for chunks, calls in ((None, 1), (2, 3)):
        served.fill_pools(seed=14)
        fresh_slots(served, slots, prefix)
        monkeypatch.setattr(kernel, "_most_chunks", chunks)
        batch = served.batch(ForwardMode.EXTEND, new, prefix, slots, tracked=[(1, 8)])
        outputs = served.forward(x, batch)
        pools = [pool.clone() for layer in (0, 1) for pool in served.states(layer)]
        found.append(outputs + pools)
        assert len(kernel._pass.parts) == calls
    for one, several in zip(*found, strict=True):
        assert relative_error(several, one.double()) < 1e-3


def test_calls_have_at_most_so_many_chunks_or_one_request() -> None:
    lengths = [1, 70, 130, 0, 3, 5, 64]
    for most, ends in {1: [1, 2, 4, 5, 6, 7], 2: [1, 2, 4, 6, 7], 3: [2, 4, 7], 99: [7]}.items():
        calls = list(divided(lengths, most))
        assert [call.stop for call in calls] == ends
        assert [call.start for call in calls] == [0, *ends[:-1]]
    assert list(divided([300] * 3, None)) == [slice(0, 3)]


def test_a_draft_leaves_the_states_as_they_are(served: Any) -> None:
    call, q = extend_call(served)
    _, states = served.states(0)
    kernel = served.dispatcher.extend_kernel
    before = states.clone()
    draft = kernel.extend(*(x.clone() for x in q), **call, is_spec_decode=True)
    assert torch.equal(states, before)
    committed = kernel.extend(*q, **call)
    assert not torch.equal(states[1], before[1])
    assert relative_error(draft, committed.double()) < 1e-3


def test_a_padded_request_of_a_draft_starts_from_nothing(served: Any) -> None:
    """Padded rows of captured graphs write slot 0, and a state there may have become NaN."""
    call, q = extend_call(served)
    _, states = served.states(0)
    kernel = served.dispatcher.extend_kernel
    slots = call["cache_indices"].clone()
    slots[-1] = -1
    outs = []
    for filler in (0.0, float("nan")):
        states[0] = filler
        tokens_of_call = [x.clone() for x in q]
        outs.append(
            kernel.extend(*tokens_of_call, **{**call, "cache_indices": slots}, is_spec_decode=True)
        )
    assert not outs[1].isnan().any() and torch.equal(*outs)


def test_what_the_operator_refuses_goes_to_stock(
    served: Any, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the very arguments, before anything is written; in strict mode not at all."""
    seen = []
    for name in ("extend", "packed_decode"):
        monkeypatch.setattr(
            TritonKDAKernel, name, lambda self, *args, **call: seen.append((args, call))
        )
    kernel = served.dispatcher.extend_kernel
    call, inputs = extend_call(served)
    _, states = served.states(0)
    before = states.clone()
    tracked = {
        "track_state": torch.empty(2, *states.shape[1:], dtype=torch.bfloat16),
        "track_chunk_idx": torch.zeros(2, dtype=torch.int32),
    }
    kernel.extend(*inputs, **call, **tracked)
    assert seen[0][0] == inputs
    assert seen[0][1].keys() == {*call, *tracked}
    assert "prefill: snapshots must have dtype float32, got bfloat16" in log_lines[0]
    row = torch.zeros(2, 768, dtype=torch.bfloat16)
    decode = {
        "A_log": call["A_log"],
        "dt_bias": call["dt_bias"],
        "ssm_states": states,
        "cache_indices": call["cache_indices"],
        "num_v_heads": 2,
        "head_v_dim": 128,
        "scale": 128**-0.5,
    }
    kernel.packed_decode(row, row[:, :256], row[None, :, :2], **decode, replayssm_d=row)
    assert len(seen) == 2
    assert "--enable-linear-replayssm" in log_lines[1]
    assert torch.equal(states, before)
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="snapshots must have dtype float32"):
        kernel.extend(*inputs, **call, **tracked)


def test_a_model_that_sglang_compiles_calls_kernels_of_ours_as_they_are() -> None:
    """--enable-torch-compile compiles the forward passes of decodes."""
    with on_an_a100(), torch.no_grad():
        served = Served("--attention-backend", "kda", "--enable-torch-compile")
        layer = served.layers[0].attn
        batch = served.batch(ForwardMode.DECODE, [1] * 3, [5, 6, 7], [3, 1, 7])
        rows = torch.randn(3, 3 * layer.q_dim, generator=torch.Generator().manual_seed(1))
        rows, beta = rows.bfloat16(), torch.zeros(1, 3, layer.num_v_heads).bfloat16()

        def step(rows: torch.Tensor) -> Any:
            return layer(batch, 2 * rows, rows[None, :, : layer.q_dim], beta) + 1

        outputs = []
        torch._dynamo.reset()
        for run in (step, torch.compile(step, backend="eager")):
            served.fill_pools(seed=1)
            with forward_context(ForwardContext(attn_backend=served.backend)):
                served.backend.init_forward_metadata(batch)
                outputs.append([run(rows), *(pool.clone() for pool in served.states(0))])
        for eager, compiled in zip(*outputs, strict=True):
            assert torch.equal(compiled, eager)


def test_layers_whose_weights_are_in_host_memory_stay_upstreams(log_lines: list[str]) -> None:
    """--cpu-offload-gb brings them to the GPU in the forward of a layer alone, and kernels here are
    compiled, and drafts committed, outside of it. Another device of this machine stands for it."""
    served = Served()
    attention = served.layers[1].attn
    attention.A_log = torch.nn.Parameter(attention.A_log.to("meta"))
    with on_an_a100():
        assert not sglang_layer.install(served.backend.linear_attn_backend, served.runner)
    dispatcher = served.backend.linear_attn_backend.kernel_dispatcher
    assert type(dispatcher.extend_kernel) is type(dispatcher.decode_kernel) is TritonKDAKernel
    assert any("serve without --cpu-offload-gb" in line for line in log_lines)


@pytest.mark.parametrize("bounded", [False, True])
def test_decode_of_convolved_rows(served: Any, bounded: bool) -> None:
    """The seam below the layer's: packed rows, and q, k and v apart, agree with prefill."""
    kernel = served.dispatcher.decode_kernel
    if bounded:
        if kernel.selection.target.vendor != "cpu":
            pytest.skip("one plan serves one gate")
        plan = sglang_layer.selection_for(
            torch.device("cpu"), KdaShape(2, 2, 128, 128, bounded_gate=True)
        )
        kernel = sglang_kernel.KdaKernel(plan, torch.device("cpu"))
    call, (q, k, v, g, beta) = extend_call(served)
    lengths = torch.arange(3, dtype=torch.int32)
    call |= {"query_start_loc": lengths, "lower_bound": -5.0 if bounded else None}
    call["extend_seq_lens_cpu"] = [1, 1]
    q, k, v, g, beta = (x[:, :2] for x in (q, k, v, g, beta))
    logits = torch.logit(beta)
    _, states = served.states(0)
    before = states.clone()
    want = kernel.extend(q, k, v, g, beta, **call)
    after = states.clone()
    states.copy_(before)
    del call["query_start_loc"], call["extend_seq_lens_cpu"]
    rows = torch.cat([x.flatten(2) for x in (q, k, v)], -1)[0]
    got = kernel.packed_decode(
        rows, g.flatten(2), logits, **call, num_v_heads=2, head_v_dim=128, scale=128**-0.5
    )
    assert got.shape == want.shape
    assert relative_error(got, want.double()) < TOLERANCE
    assert relative_error(states, after.double()) < STATE_TOLERANCE
    states.copy_(before)
    apart = kernel.decode(q, k, v, g, logits, query_start_loc=lengths, **call)
    assert torch.equal(apart, got)


def extend_call(served: Any) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """A prefill of two requests of 2 and 3 tokens, as the dispatcher is called."""
    served.fill_pools(seed=11)
    generator = torch.Generator().manual_seed(12)
    q, k, v, g = (torch.randn(1, 5, 2, 128, generator=generator).bfloat16() for _ in range(4))
    beta = torch.rand(1, 5, 2, generator=generator) * 0.9 + 0.05
    layer = served.layers[0]
    call = {
        "ssm_states": served.states(0)[1],
        "cache_indices": torch.tensor([1, 6], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "lower_bound": None,
        "extend_seq_lens_cpu": [2, 3],
    }
    return call, (q, k, v, g, beta)


def pools(served: Any) -> list[list[torch.Tensor]]:
    return [[pool.clone() for pool in served.states(layer)] for layer in range(len(LAYERS))]


def check_pools(
    served: Any, layer: int, want: dict[int, Definition], before: list[torch.Tensor]
) -> None:
    """Both states of the slots by the definition, every other slot bit for bit."""
    conv, states = served.states(layer)
    for slot, request in want.items():
        assert relative_error(states[slot], request.state[0]) < STATE_TOLERANCE
        assert relative_error(conv[slot].T, request.window) < STATE_TOLERANCE
    others = [slot for slot in range(SLOTS + 1) if slot not in want]
    assert torch.equal(conv[others], before[0][others])
    assert torch.equal(states[others], before[1][others])
