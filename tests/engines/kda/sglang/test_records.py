"""Drafts of sglang's KDA layers as records: its own pools and steps, no states in between."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.hybrid_arch import hybrid_kda_config, mambaish_config
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.runtime_context import get_exec, get_schedule, publish
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from torch.utils._python_dispatch import TorchDispatchMode

from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from kda_backend.engines import sglang_records
from kda_backend.engines.draft_records import VARIABLE
from kda_backend.engines.sglang_records import FLAG
from tests.engines.kda.sglang.harness import (
    LAYERS,
    LING,
    Served,
    load,
    on_an_a100,
    one_rank,
    pools_of,
    server_args,
)
from tests.engines.kda.sglang.test_drafts import (  # its tests too, of this module's server
    DRAFT,
    commit,
    drafts,
    kept_of,
    options,
    states_after,
    test_a_drafting_models_own_backend_is_left_alone,  # noqa: F401
    test_a_graph_of_drafts_serves_other_requests_than_it_was_captured_with,  # noqa: F401
    test_drafts_are_verified_and_what_is_accepted_is_kept,  # noqa: F401
    test_drafts_of_different_lengths,  # noqa: F401
    test_padded_requests,  # noqa: F401
    test_the_prefix_cache_gets_the_state_of_an_accepted_token,  # noqa: F401
)
from tests.engines.kda.sglang.test_layer import check_pools, definitions, pools, tokens

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
    kernels = on_an_a100() if request.param == "triton" else contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as patch, kernels, torch.no_grad():
        restore(patch)
        model = ("--model-path", ling) if request.param == "Ling-V3" else ()
        yield Served(*options(1, FLAG, *model))


def test_there_are_no_states_of_drafts(served: Served) -> None:
    assert served.pool.mamba_pool.mamba_cache.intermediate_ssm is None
    assert served.pool.mamba_pool.mamba_cache.replayssm_d is None


class Allocated(TorchDispatchMode):
    """Notes the addresses of tensors that torch makes in it."""

    def __init__(self, addresses: set[int]) -> None:
        super().__init__()
        self.addresses = addresses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        made: torch.Tensor = func(*args, **(kwargs or {}))
        self.addresses.add(made.untyped_storage().data_ptr())
        return made


def test_records_are_released_with_the_pools(
    upstreams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under --enable-memory-saver, which frees what is allocated in a region of its own."""
    freed: set[int] = set()
    adapter = SimpleNamespace(region=lambda *_, **__: Allocated(freed))
    monkeypatch.setattr(TorchMemorySaverAdapter, "create", lambda *_, **__: adapter)
    served = Served(*options(1, FLAG))
    cache = served.pool.mamba_pool.mamba_cache
    found = (cache.temporal, cache.intermediate_conv_window[0], *kept_of(served))
    assert {x.untyped_storage().data_ptr() for x in found} <= freed
    records = sglang_records.records_of(served.backend.linear_attn_backend)
    assert records._rows.untyped_storage().data_ptr() not in freed  # written once


def test_weights_that_are_loaded_anew_are_those_of_the_commit(upstreams: None) -> None:
    with torch.no_grad():
        served = Served(*options(1, FLAG))
        served.fill_pools(seed=19)
        anew = [{**served.weights(layer)} for layer in LAYERS]
        for weights, layer in zip(anew, served.layers, strict=True):
            weights["A_log"], weights["dt_bias"] = weights["A_log"] + 0.5, -weights["dt_bias"]
            load(layer, weights, is_ling=served.is_ling)
        x, before = tokens(DRAFT, seed=20), pools(served)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served, "weights", dict(zip(LAYERS, anew, strict=True)).get)
            found = [definitions(served, layer, [4], [False])[0] for layer in range(len(LAYERS))]
        served.forward(x, drafts(served, [4]))
        commit(served, [3])
    for layer, request in enumerate(found):
        _, (after,) = states_after([request], x, [DRAFT])
        check_pools(served, layer, {4: after[2]}, before[layer])


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
    drafting = {
        "spec_algorithm": SimpleNamespace(is_none=lambda: False),
        "hybrid_kda_config": hybrid_kda_config(model_config),
    }
    pools = pools_of(arguments, model_config, gib, **drafting)
    return int(get_schedule().max_mamba_cache_size // pools._calculate_mamba_ratio())


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
    found = sum(x.nbytes for x in kept_of(served))
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
