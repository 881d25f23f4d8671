"""Drafts in sglang's KDA layers: verified in one launch, committed by sglang, also out of a graph.

sglang makes the metadata, the buffers and, once tokens are accepted, the copies into its pools.
Results are compared with the definition in float64 and with sglang's own kernels, which run in the
interpreter too. Kimi-K3's layers also hand over the norm of their output. `test_records` runs the
tests of steps with a server that keeps records.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_layer, sglang_records, sglang_verify
from kda_backend.selection import KdaShape
from tests.engines.kda.sglang.device_graph import DeviceGraph
from tests.engines.kda.sglang.harness import LAYERS, Served, on_an_a100
from tests.engines.kda.sglang.test_layer import (
    HIDDEN,
    STATE_TOLERANCE,
    TOLERANCE,
    check_pools,
    definitions,
    pools,
    tokens,
)
from tests.engines.kda.weights import CHECKPOINT, Definition

DRAFT = 4  # the token sampled last, and three that are proposed
SIZE = 4  # requests of a captured batch


def options(topk: int = 1, *more: str) -> list[str]:
    return [
        *("--attention-backend", "kda", "--speculative-algorithm", "EAGLE"),
        *("--speculative-draft-model-path", str(CHECKPOINT), "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(DRAFT)),
        *more,
    ]


@pytest.fixture(scope="module", params=["torch", "triton"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server that drafts; ``triton``: with the kernels that an A100's table chooses."""
    kernels = on_an_a100() if request.param == "triton" else contextlib.nullcontext()
    with kernels, torch.no_grad():
        yield Served(*options())


def verify_input(number: int, layout: RaggedVerifyLayout | None = None) -> EagleVerifyInput:
    """What a worker of EAGLE with one proposal per step hands over, as far as layers read it."""
    none = torch.zeros(0, dtype=torch.int64)
    spec = EagleVerifyInput(
        draft_token=none,
        custom_mask=none,
        positions=none,
        retrieve_index=none,
        retrieve_next_token=none,
        retrieve_next_sibling=none,
        retrieve_cum_len=none,
        spec_steps=DRAFT - 1,
        topk=1,
        draft_token_num=DRAFT,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=9 * number,
        seq_lens_cpu=torch.full((number,), 9),
    )
    spec.ragged_verify_layout = layout
    return spec


def ragged(lengths: Sequence[int], padded: int) -> RaggedVerifyLayout:
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return RaggedVerifyLayout(
        verify_lens=torch.tensor(lengths, dtype=torch.int32),
        graph_num_tokens=padded,
        extend_start_loc=bounds[:-1],
        qo_indptr_device=bounds,
    )


def drafts(served: Served, slots: Sequence[int], layout: RaggedVerifyLayout | None = None) -> Any:
    """A batch to verify."""
    number = len(slots)
    batch = served.batch(ForwardMode.TARGET_VERIFY, [DRAFT] * number, [9] * number, slots)
    batch.spec_info = verify_input(number, layout)
    return batch


def states_after(requests: list[Definition], x: torch.Tensor, lengths: Sequence[int]) -> Any:
    """Outputs of the drafts ``x [T, hidden]``, and each request after each of its tokens."""
    outputs, after = [], []
    for request, own in zip(requests, x.split(list(lengths)), strict=True):
        after.append([])
        for token in own:
            outputs.append(request.run(token[None]))
            after[-1].append(copy.copy(request))
    return torch.cat(outputs), after


def buffers(served: Served, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``[rows, DRAFT, 3, C]`` windows of a layer and ``[rows, DRAFT, HV, V, K]`` states, if any."""
    cache = served.pool.mamba2_layer_cache(LAYERS[layer])
    return cache.intermediate_conv_window[0], cache.intermediate_ssm


def clear_buffers(served: Served) -> None:
    for x in kept_of(served):
        x.fill_(torch.nan)


def kept_of(served: Served) -> list[torch.Tensor]:
    """What drafts are kept in: states and windows of both layers, ``[rows, ...]``, or records."""
    if (found := sglang_records.records_of(served.backend.linear_attn_backend)) is not None:
        return [layer for x in found.records[:2] for layer in x.unbind()]
    return [buffer for layer in range(len(LAYERS)) for buffer in buffers(served, layer)]


def commit(
    served: Served,
    accepted: Sequence[int],
    tracked: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> None:
    """As `commit_mamba_states_after_verify` calls it. sglang's kernels insist on tensors of a GPU:
    that of the windows, and that of states, which records have none of."""
    place = sglang_records.hybrid_linear_attn_backend
    keeps_records = served.pool.mamba_pool.mamba_cache.intermediate_ssm is None
    upstream = place.scatter_mamba_states_after_mtp_verify

    def scatter(*given: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
            upstream(*given)

    with pytest.MonkeyPatch.context() as patch:
        if keeps_records:
            patch.setattr(place, "scatter_mamba_states_after_mtp_verify", scatter)
        else:
            patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        served.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=torch.tensor(accepted) - 1,
            mamba_track_indices=None if tracked is None else torch.tensor(tracked),
            mamba_steps_to_track=None if steps is None else torch.tensor(steps),
            model=None,
        )


def test_drafts_are_verified_and_what_is_accepted_is_kept(served: Served) -> None:
    """Twice over, with other numbers of accepted tokens, then a decode of what has become."""
    slots = [5, 2, 9]
    served.fill_pools(seed=1)
    requests = [definitions(served, layer, slots, [False] * 3) for layer in range(len(LAYERS))]
    for accepted, seed in (([1, 4, 2], 2), ([3, 1, 4], 3)):
        clear_buffers(served)
        x, before = tokens(3 * DRAFT, seed), pools(served)
        outputs = served.forward(x, drafts(served, slots))
        kept = []
        for layer, output in enumerate(outputs):
            want, after = states_after(requests[layer], x, [DRAFT] * 3)
            assert relative_error(output, want) < TOLERANCE
            check_pools(served, layer, {}, before[layer])  # sglang has not decided yet
            windows, states = buffers(served, layer)
            for row, steps in enumerate(after):
                for step, request in enumerate(steps):
                    if states is not None:
                        assert relative_error(states[row, step], request.state[0]) < STATE_TOLERANCE
                    assert relative_error(windows[row, step].T, request.window) < STATE_TOLERANCE
            kept.append([steps[n - 1] for steps, n in zip(after, accepted, strict=True)])
        assert all(x[3:].isnan().all() for x in kept_of(served))
        commit(served, accepted)
        requests = kept
        for layer, found in enumerate(requests):
            check_pools(served, layer, dict(zip(slots, found, strict=True)), before[layer])
    x = tokens(3, seed=4)
    outputs = served.forward(x, served.batch(ForwardMode.DECODE, [1] * 3, [9] * 3, slots))
    for layer, output in enumerate(outputs):
        want = torch.cat([r.run(x[n : n + 1]) for n, r in enumerate(requests[layer])])
        assert relative_error(output, want) < TOLERANCE


def test_the_prefix_cache_gets_the_state_of_an_accepted_token(served: Served) -> None:
    """sglang copies the step that it names into a slot of the cache, beside what it accepts."""
    slots = [5, 2]
    served.fill_pools(seed=5)
    x, before = tokens(2 * DRAFT, seed=6), pools(served)
    requests = [definitions(served, layer, slots, [False] * 2) for layer in range(len(LAYERS))]
    served.forward(x, drafts(served, slots))
    commit(served, [4, 2], tracked=[8, 0], steps=[1, -1])
    for layer, found in enumerate(requests):
        _, (first, second) = states_after(found, x, [DRAFT] * 2)
        check_pools(served, layer, {5: first[3], 8: first[1], 2: second[1]}, before[layer])


def test_drafts_of_different_lengths(served: Served) -> None:
    """A ragged layout, padded with tokens of nobody, which get zeros."""
    slots, lengths = [3, 7, 1], [4, 1, 2]
    served.fill_pools(seed=7)
    clear_buffers(served)
    x, before = tokens(10, seed=8), pools(served)
    requests = [definitions(served, layer, slots, [False] * 3) for layer in range(len(LAYERS))]
    outputs = served.forward(x, drafts(served, slots, ragged(lengths, 10)))
    kept = []
    for layer, output in enumerate(outputs):
        want, after = states_after(requests[layer], x[:7], lengths)
        assert relative_error(output[:7], want) < TOLERANCE
        assert not output[7:].any()
        states = buffers(served, layer)[1]
        assert states is None or states[1, 1:].isnan().all()
        kept.append([steps[-1] for steps in after])
    commit(served, lengths)
    for layer, found in enumerate(kept):
        check_pools(served, layer, dict(zip(slots, found, strict=True)), before[layer])


def test_padded_requests(served: Served) -> None:
    """Rows of -1 or slot 0 give zeros and keep nothing."""
    served.fill_pools(seed=9)
    clear_buffers(served)
    x = tokens(3 * DRAFT, seed=10)
    requests = [definitions(served, layer, [6], [False]) for layer in range(len(LAYERS))]
    batch = drafts(served, [6, 0, 0])
    batch._original_batch_size = 1
    before = pools(served)
    for layer, output in enumerate(served.forward(x, batch)):
        want, _ = states_after(requests[layer], x[:DRAFT], [DRAFT])
        assert relative_error(output[:DRAFT], want) < TOLERANCE
        assert not output[DRAFT:].any()
        check_pools(served, layer, {}, before[layer])
    assert all(x[1:].isnan().all() for x in kept_of(served))


@pytest.mark.parametrize("lengths", [None, [4, 1, 2]], ids=["equal", "ragged"])
def test_upstreams_kernels_agree(served: Served, lengths: list[int] | None) -> None:
    """The method that is replaced, on the same batch: its outputs and what sglang then commits."""
    slots = [5, 2, 9]
    layout = None if lengths is None else ragged(lengths, sum(lengths))
    counts = lengths or [DRAFT] * 3
    x, found = tokens(sum(counts), seed=11), []
    backend = served.backend.linear_attn_backend
    ours = backend._forward_target_verify
    for method in (ours, ours.args[2]):
        served.fill_pools(seed=12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "_forward_target_verify", method)
            outputs = served.forward(x, drafts(served, slots, layout))
        commit(served, [min(n, 3) for n in counts])
        found.append((outputs, pools(served)))
    for ours_out, upstreams in zip(found[0][0], found[1][0], strict=True):
        assert relative_error(ours_out, upstreams.double()) < TOLERANCE
    for layer in range(len(LAYERS)):
        for one, other in zip(found[0][1][layer], found[1][1][layer], strict=True):
            assert relative_error(one, other.double()) < STATE_TOLERANCE


@pytest.mark.parametrize("handed_over", ["norm", "norm that nobody takes", "nothing"])
def test_kimi_k3s_norm_ends_the_launch(served: Served, handed_over: str) -> None:
    """As the model hands it over, and as it learns that it was taken."""
    slots = [5, 2]
    served.fill_pools(seed=13)
    x = tokens(2 * DRAFT, seed=14)
    batch = drafts(served, slots)
    attention = served.layers[0].attn
    backend = served.backend.linear_attn_backend
    served.backend.init_forward_metadata(batch)
    generator = torch.Generator().manual_seed(15)
    mixed, gate = (
        torch.randn(2 * DRAFT, width, generator=generator).bfloat16() for width in (768, 256)
    )
    a, b = (x[None, :, :width].contiguous() for width in (256, 2))
    plain = backend._forward_target_verify(attention, batch, mixed, a, b)
    weight = 1 + torch.rand(128, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        if handed_over != "nothing":
            patch.setattr(attention, "_k3_fused_decode_args", (weight, 1e-5), raising=False)
            patch.setattr(attention, "_k3_onorm_gate", gate, raising=False)
        patch.setattr(attention, "_k3_onorm_consumed", False, raising=False)
        method = backend._forward_target_verify
        if handed_over == "norm that nobody takes":
            method = method.args[2]  # upstream's kernels leave it to the model
        normed = method(attention, batch, mixed, a, b)
        assert attention._k3_onorm_consumed is (handed_over == "norm")
    if handed_over != "norm":
        assert relative_error(normed, plain.double()) < TOLERANCE
        return
    want = plain.double() * plain.double().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
    want = want * weight.double() * gate.double().view(want.shape).sigmoid()
    assert relative_error(normed, want) < TOLERANCE


@pytest.mark.parametrize("bounded", [False, True])
def test_a_bounded_gate(served: Served, bounded: bool) -> None:
    """Kimi-K3's and the others', beside sglang's kernels with the same bound."""
    if served.dispatcher.decode_kernel.selection.target.vendor != "cpu":
        pytest.skip("one selection serves one gate")
    selection = sglang_layer.selection_for(
        torch.device("cpu"), KdaShape(2, 2, 128, 128, bounded_gate=bounded)
    )
    served.fill_pools(seed=16)
    batch = drafts(served, [5, 2])
    served.backend.init_forward_metadata(batch)
    attention = served.layers[0].attn
    backend = served.backend.linear_attn_backend
    metadata = backend.forward_metadata
    cache = served.pool.mamba2_layer_cache(LAYERS[0])
    mixed = torch.randn(2 * DRAFT, 768, generator=torch.Generator().manual_seed(17)).bfloat16()
    a, b = (tokens(2 * DRAFT, seed=18)[None, :, :width].contiguous() for width in (256, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "lower_bound", -5.0 if bounded else None)
        conv = cache.conv[0].clone()
        ours = sglang_verify.verify(
            selection,
            attention,
            cache,
            (mixed, a, b),
            metadata.mamba_cache_indices,
            backend.verify_intermediate_state_indices,
            metadata.query_start_loc,
        )
        kept = [x[:2].clone() for x in buffers(served, 0)]
        assert torch.equal(cache.conv[0], conv)
        want = backend._forward_target_verify.args[2](attention, batch, mixed, a, b)
        assert relative_error(ours, want[0].double()) < TOLERANCE
        for one, other in zip(kept, buffers(served, 0), strict=True):
            assert relative_error(one, other[:2].double()) < STATE_TOLERANCE


def capture(served: Served) -> tuple[DeviceGraph, torch.Tensor, Any]:
    """As sglang's runner: a graph of `SIZE` requests in slot 0, after a warm-up."""
    served.init_graphs(SIZE, SIZE * DRAFT)
    x = torch.zeros(SIZE * DRAFT, HIDDEN, dtype=torch.bfloat16)
    graph = DeviceGraph()
    served.pool.req_index_to_mamba_index_mapping.zero_()
    batch = view(SIZE, torch.zeros(SIZE, dtype=torch.int64))
    served.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    served.layers_on(x, batch)
    return graph, x, graph.record(lambda: served.layers_on(x, batch))


def view(requests: int, rows: torch.Tensor) -> Any:
    """The padded batch of `SIZE` requests, ``requests`` of them real, in rows of sglang's pool."""
    length = torch.full((SIZE,), 9, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=SIZE,
        input_ids=torch.zeros(SIZE * DRAFT, dtype=torch.int64),
        req_pool_indices=rows,
        seq_lens=length,
        seq_lens_cpu=length,
        out_cache_loc=torch.zeros(SIZE * DRAFT, dtype=torch.int64),
        seq_lens_sum=9 * SIZE,
        positions=torch.zeros(SIZE * DRAFT, dtype=torch.int64),
    )
    batch.spec_info = verify_input(SIZE)
    batch.num_padding = SIZE - requests
    return batch


def test_a_graph_of_drafts_serves_other_requests_than_it_was_captured_with(
    served: Served,
) -> None:
    """Captured with the dummy batch in slot 0; replayed for other slots, and fewer of them."""
    if served.dispatcher.decode_kernel.selection.target.vendor == "cpu":
        pytest.skip("the torch path reads values on the host")
    served.fill_pools(seed=20)
    graph, x, outputs = capture(served)
    assert sum("verify" in name for name in graph.kernels) == len(LAYERS)
    mapping = served.pool.req_index_to_mamba_index_mapping
    for seed, slots in enumerate(([5, 2, 9], [7], [9, 3, 5, 1]), start=21):
        number, accepted = len(slots), [2, 4, 1, 3][: len(slots)]
        clear_buffers(served)
        before = pools(served)
        requests = [
            definitions(served, layer, slots, [False] * number) for layer in range(len(LAYERS))
        ]
        mapping[1 : number + 1] = torch.tensor(slots, dtype=mapping.dtype)
        rows = torch.zeros(SIZE, dtype=torch.int64)
        rows[:number] = torch.arange(1, number + 1)
        x.copy_(tokens(SIZE * DRAFT, seed))
        served.backend.init_forward_metadata_out_graph(view(number, rows))
        graph.replay()
        real = number * DRAFT
        kept = []
        for layer, output in enumerate(outputs):
            want, after = states_after(requests[layer], x[:real], [DRAFT] * number)
            assert relative_error(output[:real], want) < TOLERANCE
            assert not output[real:].any()
            kept.append([steps[n - 1] for steps, n in zip(after, accepted, strict=True)])
        commit(served, accepted)
        for layer, found in enumerate(kept):
            check_pools(served, layer, dict(zip(slots, found, strict=True)), before[layer])


def test_a_tree_stays_upstreams(log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(*options(2))
    backend = served.backend.linear_attn_backend
    assert "_forward_target_verify" not in vars(backend)
    assert "forward_decode" in vars(backend)
    (line,) = (line for line in log_lines if "drafts" in line)
    assert "they form a tree (--speculative-eagle-topk 2), not a chain" in line
    assert any("prefill and decode of 2 KDA layers" in line for line in log_lines)
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="they form a tree"):
        Served(*options(2))


def test_what_the_operator_refuses_is_upstreams_batch(
    served: Served, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the very arguments, before anything is written; so is a batch with a tree."""
    seen: list[tuple[Any, ...]] = []
    backend = served.backend.linear_attn_backend
    kernel, _, _ = backend._forward_target_verify.args
    batch = drafts(served, [5, 2])
    served.backend.init_forward_metadata(batch)
    attention = served.layers[0].attn
    wrong = torch.zeros(2 * DRAFT, 768, dtype=torch.float64)
    given = (attention, batch, wrong, wrong[None, :, :256], wrong[None, :, :2])
    call = (kernel, backend, lambda *args: seen.append(args))
    sglang_verify.verify_layer(*call, *given)
    assert "drafts: q must have dtype" in log_lines[0]
    tree = torch.zeros(2, DRAFT, dtype=torch.int64)
    monkeypatch.setattr(backend.forward_metadata, "retrieve_next_token", tree)
    sglang_verify.verify_layer(*call, *given)
    assert "form a tree" in log_lines[1]
    assert [len(args) for args in seen] == [5, 5]
    assert all(x is y for args in seen for x, y in zip(args, given, strict=True))


@pytest.mark.parametrize(
    ("change", "gpu", "message"),
    [
        ({}, "H200", None),
        ({}, "B200", "nv_cutedsl was chosen: pass --linear-attn-verify-backend triton"),
        ({"kernel": object()}, "H200", "nv_cutedsl was chosen"),
        ({"fused": print}, "H200", "SGLANG_OPT_FUSED_KDA_VERIFY"),
        ({"states": None}, "H200", "--enable-linear-replayssm-spec"),
        ({"one_launch": False}, "H200", "another width"),
        # with pipeline parallelism: the row is not the batch's
        ({"environment": "SGLANG_ENABLE_PP_SPEC"}, "H200", "SGLANG_ENABLE_PP_SPEC"),
    ],
)
def test_refusals(
    served: Served,
    change: dict[str, Any],
    gpu: str,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a server whose verification is sglang's default for Kimi's models."""
    if "environment" in change:
        monkeypatch.setenv(change["environment"], "1")
    upstream = served.backend.linear_attn_backend
    dispatcher = upstream.kernel_dispatcher
    assert dispatcher.verify_backend.is_nv_cutedsl()
    backend = SimpleNamespace(
        topk=1,
        kernel_dispatcher=SimpleNamespace(
            verify_kernel=change.get("kernel", dispatcher.verify_kernel),
            verify_backend=dispatcher.verify_backend,
        ),
        _fused_chain_verify_fn=change.get("fused"),
    )
    cache = SimpleNamespace(intermediate_ssm=change.get("states", torch.zeros(1)))
    one_launch = change.get("one_launch", True)
    found = sglang_verify.refusal(backend, cache, KNOWN_TARGETS[gpu], one_launch=one_launch)
    assert found is None if message is None else message in str(found)


def test_without_drafts_nothing_is_said(log_lines: list[str]) -> None:
    served = Served("--attention-backend", "kda")
    assert "_forward_target_verify" not in vars(served.backend.linear_attn_backend)
    assert not [line for line in log_lines if "drafts" in line]


def test_a_drafting_models_own_backend_is_left_alone(served: Served, log_lines: list[str]) -> None:
    """Its layers are softmax attention, whatever the target's are, beside the target's pools."""
    of_draft = {"model": torch.nn.Linear(2, 2), "is_draft_worker": True}
    runner = SimpleNamespace(**{**vars(served.runner), **of_draft})
    full = attention_registry.ATTENTION_BACKENDS["torch_native"](runner)
    linear = attention_registry.attn_backend_wrapper(runner, full).linear_attn_backend
    assert type(linear) is type(served.backend.linear_attn_backend)
    assert type(linear.kernel_dispatcher.decode_kernel) is TritonKDAKernel
    assert not any("falling back" in line for line in log_lines)
