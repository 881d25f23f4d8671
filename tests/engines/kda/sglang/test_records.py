"""Drafts of sglang's KDA layers as records: its own pools and steps, no states in between."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.hybrid_arch import hybrid_kda_config, mambaish_config
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec, get_schedule, publish

from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.numerics import relative_error
from kda_backend.engines import sglang_layer, sglang_records
from kda_backend.engines.draft_records import VARIABLE
from kda_backend.engines.sglang_records import FLAG
from tests.engines.kda.sglang.harness import LAYERS, LING, Served, one_rank, server_args
from tests.engines.kda.sglang.test_drafts import (
    DRAFT,
    SIZE,
    capture,
    check_pools,
    drafts,
    options,
    pools,
    ragged,
    states_after,
    view,
)
from tests.engines.kda.sglang.test_layer import (
    TOLERANCE,
    definitions,
    kernels_of_an_a100,
    tokens,
)

_POOL = HybridReqToTokenPool.mamba_pool_cls
_RING = KimiLinearCacheParams.replayssm_ring_bytes_per_req


@pytest.fixture
def upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server changes of sglang's classes is taken back behind the test."""
    restore(monkeypatch)


def restore(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HybridReqToTokenPool, "mamba_pool_cls", _POOL)
    patch.setattr(KimiLinearCacheParams, "replayssm_ring_bytes_per_req", _RING)


@pytest.fixture(scope="module")
def ling(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the configuration of a small Ling-V3 lies."""
    folder = tmp_path_factory.mktemp("ling")
    (folder / "config.json").write_text(json.dumps(LING))
    return str(folder)


@pytest.fixture(scope="module", params=["torch", "triton", "Ling-V3"])
def served(request: pytest.FixtureRequest, ling: str) -> Iterator[Served]:
    """A server that keeps records; ``triton``: with the kernels that an A100's table chooses;
    ``Ling-V3``: of the layers of that model."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        restore(patch)
        if request.param == "triton":
            patch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
            patch.setattr(sglang_layer, "compile_kernels", lambda *_: None)  # they are interpreted
        model = ("--model-path", ling) if request.param == "Ling-V3" else ()
        yield Served(*options(1, FLAG, *model))


def commit(
    served: Served,
    accepted: Sequence[int],
    tracked: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> None:
    """As `commit_mamba_states_after_verify` calls it. sglang's kernel for the windows insists on
    tensors of a GPU."""
    upstream = sglang_records.hybrid_linear_attn_backend.fused_conv_window_scatter_with_mask

    def scatter(*tensors: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
            upstream(*tensors)

    with pytest.MonkeyPatch.context() as patch:
        place = sglang_records.hybrid_linear_attn_backend
        patch.setattr(place, "fused_conv_window_scatter_with_mask", scatter)
        served.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=torch.tensor(accepted) - 1,
            mamba_track_indices=None if tracked is None else torch.tensor(tracked),
            mamba_steps_to_track=None if steps is None else torch.tensor(steps),
            model=None,
        )


def records(served: Served) -> Any:
    found = sglang_records.records_of(served.backend.linear_attn_backend)
    assert found is not None
    return found.records


def test_what_is_accepted_is_in_the_pools_when_a_step_ends(served: Served) -> None:
    """Twice over, with other numbers of accepted tokens, then a decode of what has become."""
    assert served.pool.mamba_pool.mamba_cache.intermediate_ssm is None
    assert served.pool.mamba_pool.mamba_cache.replayssm_d is None
    slots = [5, 2, 9]
    served.fill_pools(seed=1)
    requests = [definitions(served, layer, slots, [False] * 3) for layer in range(len(LAYERS))]
    for accepted, seed in (([1, 4, 2], 2), ([3, 1, 4], 3)):
        for x in records(served)[:2]:
            x.fill_(torch.nan)
        x, before = tokens(3 * DRAFT, seed), pools(served)
        outputs = served.forward(x, drafts(served, slots))
        kept = []
        for layer, output in enumerate(outputs):
            want, after = states_after(requests[layer], x, [DRAFT] * 3)
            assert relative_error(output, want) < TOLERANCE
            check_pools(served, layer, {}, before[layer])
            kept.append([steps[n - 1] for steps, n in zip(after, accepted, strict=True)])
        commit(served, accepted)
        for layer, found in enumerate(kept):
            check_pools(served, layer, dict(zip(slots, found, strict=True)), before[layer])
        requests = kept
    x = tokens(3, seed=4)
    outputs = served.forward(x, served.batch(ForwardMode.DECODE, [1] * 3, [9] * 3, slots))
    for layer, output in enumerate(outputs):
        want = torch.cat([r.run(x[n : n + 1]) for n, r in enumerate(requests[layer])])
        assert relative_error(output, want) < TOLERANCE


def test_the_prefix_cache_gets_a_state_inside_of_a_draft(served: Served) -> None:
    slots = [5, 2]
    served.fill_pools(seed=5)
    x, before = tokens(2 * DRAFT, seed=6), pools(served)
    requests = [definitions(served, layer, slots, [False] * 2) for layer in range(len(LAYERS))]
    served.forward(x, drafts(served, slots))
    commit(served, [4, 2], tracked=[8, 0], steps=[1, -1])
    for layer, found in enumerate(requests):
        _, (first, second) = states_after(found, x, [DRAFT] * 2)
        check_pools(served, layer, {5: first[3], 8: first[1], 2: second[1]}, before[layer])


def test_drafts_of_different_lengths_and_padding(served: Served) -> None:
    """A ragged layout, tokens of nobody, which get zeros, and a request in slot 0."""
    slots, lengths = [3, 7, 1], [4, 1, 2]
    served.fill_pools(seed=7)
    x, before = tokens(10, seed=8), pools(served)
    requests = [definitions(served, layer, slots, [False] * 3) for layer in range(len(LAYERS))]
    outputs = served.forward(x, drafts(served, slots, ragged(lengths, 10)))
    kept = []
    for layer, output in enumerate(outputs):
        want, after = states_after(requests[layer], x[:7], lengths)
        assert relative_error(output[:7], want) < TOLERANCE
        assert not output[7:].any()
        kept.append([steps[-1] for steps in after])
    commit(served, lengths)
    for layer, found in enumerate(kept):
        check_pools(served, layer, dict(zip(slots, found, strict=True)), before[layer])
    batch = drafts(served, [6, 0, 0])
    batch._original_batch_size = 1
    kept_records = [y.clone() for y in records(served)[:2]]
    for output in served.forward(tokens(3 * DRAFT, seed=10), batch):
        assert output[:DRAFT].any() and not output[DRAFT:].any()
    for got, want in zip(records(served)[:2], kept_records, strict=True):
        assert torch.equal(got[:, 1:].nan_to_num(), want[:, 1:].nan_to_num())


def test_a_graph_serves_other_requests_than_it_was_captured_with(served: Served) -> None:
    if served.dispatcher.decode_kernel.selection.target.vendor == "cpu":
        pytest.skip("the torch path reads values on the host")
    served.fill_pools(seed=20)
    graph, x, outputs = capture(served)
    assert graph.kernels.count("verify_records_kernel") == len(LAYERS)
    mapping = served.pool.req_index_to_mamba_index_mapping
    for seed, slots in enumerate(([5, 2, 9], [9, 3, 5, 1]), start=21):
        number, accepted = len(slots), [2, 4, 1, 3][: len(slots)]
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
        real, kept = number * DRAFT, []
        for layer, output in enumerate(outputs):
            want, after = states_after(requests[layer], x[:real], [DRAFT] * number)
            assert relative_error(output[:real], want) < TOLERANCE
            assert not output[real:].any()
            kept.append([steps[n - 1] for steps, n in zip(after, accepted, strict=True)])
        commit(served, accepted)
        for layer, found in enumerate(kept):
            check_pools(served, layer, dict(zip(slots, found, strict=True)), before[layer])


def test_a_draft_that_the_operator_refuses_ends_the_server(served: Served) -> None:
    """There is nothing that sglang's kernels could keep it in."""
    batch = drafts(served, [5, 2])
    served.backend.init_forward_metadata(batch)
    wrong = torch.zeros(2 * DRAFT, 768, dtype=torch.float64)
    backend = served.backend.linear_attn_backend
    with pytest.raises(RuntimeError, match="cannot be kept as records: q must have dtype"):
        backend._forward_target_verify(
            served.layers[0].attn, batch, wrong, wrong[None, :, :256], wrong[None, :, :2]
        )


def requests_of(gib: float, *more: str) -> int:
    """The requests that sglang lets run with so much memory for its pools."""
    arguments = server_args(*options(1, *more))
    publish(arguments, role="test")
    one_rank()
    model_config = ModelConfig.from_server_args(arguments)
    sizes = {"attn_dp_size": 1, "pp_size": 1}
    config = mambaish_config(model_config)
    configurator = SimpleNamespace(
        server_args=arguments,
        model_config=model_config,
        mambaish_config=config,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        hybrid_gdn_config=None,
        hybrid_kda_config=hybrid_kda_config(model_config),
        extra_mamba_cache_bytes_per_req=0,
        fused_entry_bytes=lambda kind: None,
        ps=SimpleNamespace(**sizes),
        **sizes,
    )
    for name in ("_calculate_mamba_ratio", "_handle_max_mamba_cache"):
        method = getattr(KVCacheConfigurator, name)
        setattr(configurator, name, MethodType(method, configurator))
    configurator._handle_max_mamba_cache(gib)
    return int(get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio())


@pytest.mark.parametrize("name", ["Kimi-Linear", "Ling-V3"])
def test_more_requests_run(upstreams: None, name: str, ling: str) -> None:
    """By sglang's own sizing of its pools, which counts what ours then allocate."""
    size, gib = ("--max-running-requests", "4000"), 1.0
    size += ("--model-path", ling) if name == "Ling-V3" else ()
    states, rings = requests_of(gib, *size), requests_of(gib, *size, FLAG)
    served = Served(*options(1, FLAG, *size))
    ours = requests_of(gib, *size, FLAG)
    assert ours > max(rings, 2 * states)
    pool = served.pool.mamba_pool
    params = mambaish_config(served.runner.model_config).mamba2_cache_params
    row = sglang_records.bytes_of_row(params, DRAFT, torch.bfloat16) / len(params.layers)
    rows = served.pool.size + 1
    found = sum(x.nbytes for x in records(served)[:2])
    windows = pool.mamba_cache.intermediate_conv_window[0].untyped_storage().nbytes()
    assert found + windows == rows * row * len(LAYERS)
    # counted by slot, of which a request has three at least
    counted = 3 * params.replayssm_ring_bytes_per_req(record_len=16) / len(params.layers)
    assert row <= counted <= row + 3


def loaded(*arguments: str) -> tuple[Any, Any]:
    """A ModelRunner with weights and without pools, and one of its KDA layers."""
    resolved = server_args(*arguments)
    publish(resolved, role="test")
    one_rank()
    runner = SimpleNamespace(
        server_args=resolved,
        model_config=ModelConfig.from_server_args(resolved),
        is_draft_worker=False,
        dtype=torch.bfloat16,
    )
    return runner, SimpleNamespace(A_log=torch.zeros(1), dt_bias=torch.zeros(1))


@pytest.mark.parametrize(
    ("gpu", "asks", "environment", "kept"),
    [
        ("H200", (1,), {}, True),
        ("A100", (1,), {}, False),
        ("A100", (1,), {VARIABLE: "1"}, True),
        ("H200", (1,), {VARIABLE: "0"}, False),
        ("H200", (2,), {}, False),
        ("H200", (1,), {"SGLANG_ENABLE_PP_SPEC": "1"}, False),
        ("H200", (1,), {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, False),
    ],
)
def test_drafts_are_kept_as_records_on_hopper(
    upstreams: None,
    gpu: str,
    asks: tuple[int],
    environment: dict[str, str],
    kept: bool,
    log_lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody asks; the pools are then sized as under sglang's own flag. What cannot be served
    keeps states, which is no fallback."""
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    runner, layer = loaded(*options(*asks))
    selection: Any = SimpleNamespace(target=KNOWN_TARGETS[gpu])
    upstream = HybridReqToTokenPool.mamba_pool_cls
    sglang_records.reserve(runner, layer, selection, one_launch=True)
    assert get_exec().mamba.enable_linear_replayssm_spec == kept
    assert (HybridReqToTokenPool.mamba_pool_cls is not upstream) == kept
    assert ["are kept as records" in line for line in log_lines] == [True] * kept


def test_records_that_are_asked_for_and_not_served_are_named(
    upstreams: None, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    runner, layer = loaded(*options(2))
    selection: Any = SimpleNamespace(target=KNOWN_TARGETS["H200"])
    sglang_records.reserve(runner, layer, selection, one_launch=True)
    (line,) = log_lines
    assert line == (
        f"{VARIABLE}=1: drafts keep states and no records: they form a tree"
        " (--speculative-eagle-topk 2), not a chain"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--linear-attn-verify-backend", "flashinfer"), "flashinfer was chosen"),
        ({"one_launch": False}, "another width"),
        ({"SGLANG_ENABLE_PP_SPEC": "1"}, "SGLANG_ENABLE_PP_SPEC"),
        ({"SGLANG_OPT_FUSED_KDA_VERIFY": "1"}, "SGLANG_OPT_FUSED_KDA_VERIFY"),
    ],
)
def test_what_is_refused_stays_sglangs(
    upstreams: None,
    change: Any,
    message: str,
    log_lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = change if isinstance(change, tuple) else ()
    runner, layer = loaded(*options(1, FLAG, *more))
    one_launch = True
    for name, value in {} if more else change.items():
        if name == "one_launch":
            one_launch = value
        else:
            monkeypatch.setenv(name, value)
    selection: Any = SimpleNamespace(target=KNOWN_TARGETS["H200"])
    upstream = HybridReqToTokenPool.mamba_pool_cls
    sglang_records.reserve(runner, layer, selection, one_launch=one_launch)
    assert HybridReqToTokenPool.mamba_pool_cls is upstream
    (line,) = log_lines
    assert f"{FLAG} is served by sglang: " in line and message in line
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError):
        sglang_records.reserve(runner, layer, selection, one_launch=one_launch)
