"""MLA decode on Hopper on the CPU: planner, main kernel and combine from their own sources, one
stream (tools/cuda_on_host), against float64."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_backend import combine
from mla_backend.api import mla_decode
from mla_backend.beside import Beside
from mla_backend.decode import sm90 as mla_sm90
from mla_backend.engines import mla_decoder
from mla_backend.plan import MlaPlanner, fill
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import SCALE, assert_close, expected, forced, make_case, run_case
from tools.cuda_on_host.driver import GXX, MAP_MAGIC, HostKernel
from tools.cuda_on_host.planted import plant

pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]
INSTRUCTIONS = Path(__file__).parent / "on_host"
KERNELS = mla_sm90.SOURCE.parent
Use = Callable[..., None]


def tensor_map(
    address: int, extents: tuple[int, int, int], strides: tuple[int, int], rows: int
) -> bytes:
    """The model's, in place of cuTensorMapEncodeTiled's."""
    return struct.pack("16Q", MAP_MAGIC, address, *extents, *strides, rows, *([0] * 8))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, seed: int) -> Use:
    """Has the pipeline launch kernels on the host; combine, the last, runs them all."""

    def use(sources: Path = KERNELS) -> None:
        def kernel(name: str, module: Any, defines: dict[str, int], last: bool = False) -> Any:
            return HostKernel(
                sources / f"{name}.cu",
                name,
                module.PARAMS,
                defines,
                run_seed=seed if last else None,
                instructions=INSTRUCTIONS,
            )

        def main(defines: dict[str, int]) -> Any:
            return kernel("mla_decode", mla_sm90, defines)

        monkeypatch.setattr(fill, "_sm90_kernel", lambda: kernel("split_plan", fill, {}))
        monkeypatch.setattr(mla_sm90, "_kernel", main)
        monkeypatch.setattr(mla_sm90, "_tensor_map", tensor_map)
        mla_sm90._encode.cache_clear()
        monkeypatch.setattr(
            combine, "_sm90_kernel", lambda: kernel("mla_combine", combine, {}, last=True)
        )

    yield use  # type: ignore[misc]
    mla_sm90._encode.cache_clear()


def check(spec: MlaSpec, lengths: list[int], seed: int, sms: int = 5, **options: int) -> None:
    case = make_case(spec, lengths, seed=seed)
    assert_close(run_case(case, MlaPlanner(forced(spec, "sm90", sms), **options)), expected(case))  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [16, 64, 112])
def test_page_sizes(use: Use, seed: int, page_size: int) -> None:
    """A block in one page and across pages, empty requests, one token, several splits."""
    use()
    check(MlaSpec(4, page_size), [1, 0, 65, 300], seed, sms=4)


def test_drafts(use: Use, seed: int) -> None:
    """Causal query tokens, of which some see nothing; no request is merged."""
    use()
    check(MlaSpec(4, 16, query_tokens=4), [3, 64, 130], seed, sms=3)


def test_layers_of_a_plan_share_its_launches(
    use: Use, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another layer has other addresses, another layout and another plan launches of their own."""
    use()
    prepared: list[object] = []
    prepare = mla_sm90.Sm90Decode.prepare

    def counted(self: mla_sm90.Sm90Decode, x: Any) -> Any:
        prepared.append(x.plan)
        return prepare(self, x)

    monkeypatch.setattr(mla_sm90.Sm90Decode, "prepare", counted)
    spec = MlaSpec(4, 16)
    planner = MlaPlanner(forced(spec, "sm90", 3))
    cases = [make_case(spec, [70, 0, 130], seed=seed + n) for n in range(2)]
    plan = planner.plan(cases[0].lengths)
    for case in cases:
        assert_close(run_case(case, planner, plan=plan), expected(case))
    assert len(prepared) == 1
    q = cases[1].q_latent
    cases[1].q_latent = torch.cat([q, torch.full_like(q, float("nan"))], 2)[:, :, : q.shape[2]]
    assert_close(run_case(cases[1], planner, plan=plan), expected(cases[1]))
    assert len(prepared) == 2
    other = dataclasses.replace(plan, lengths=cases[1].lengths)
    assert_close(
        run_case(cases[1], planner, plan=planner.plan(cases[1].lengths, out=other)),
        expected(cases[1]),
    )
    assert prepared == [plan, plan, other]


def test_more_rows_than_a_tile(use: Use, seed: int) -> None:
    use()
    check(MlaSpec(66, 64), [130], seed, sms=4)


@pytest.mark.parametrize(("requests", "shares"), [(2, True), (3, True), (4, False)])
def test_a_shared_prefix_and_sinks(use: Use, seed: int, requests: int, shares: bool) -> None:
    """The rows of three requests meet their prefix in a launch of its own, which is idle where so
    few do not count."""
    use()
    spec = MlaSpec(17, 16)
    case = make_case(spec, [200, 133, 64, 201], seed=seed, shared_tokens=128)
    sinks = torch.linspace(-2, 2, 17)
    planner = MlaPlanner(
        forced(spec, "sm90", 4), shared_prefix_tokens=64, shared_prefix_requests=requests
    )
    plan = planner.plan(case.lengths, case.block_table)
    assert plan.prefix is not None and bool((plan.prefix.prefix_tile >= 0).any()) == shares
    assert_close(run_case(case, planner, sinks=sinks), expected(case, sinks=sinks))


@pytest.mark.parametrize("requests", [2, 3, 4])
def test_an_engines_step_looks_for_shared_prompts(
    use: Use, seed: int, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    """Where its row says so, from so many requests on; without a limit by the number, as alone."""
    use()
    spec = MlaSpec(4, 16)
    selection = forced(spec, "sm90", 4, shared_requests=3, shared_tokens=64)
    monkeypatch.setattr(mla_decoder, "select_beside", lambda *args: Beside({1: selection}, {}))
    decoder = mla_decoder.MlaDecoder(
        selection.target,
        torch.device("cpu"),
        heads=4,
        page_size=16,
        kernel="fa3",
        query_tokens=(1,),
        max_requests=8,
    )
    case = make_case(spec, [200, 133, 201, 7][:requests], seed=seed, shared_tokens=128)
    for _ in range(2):  # the second is planned into the plan of the first
        step = decoder.step(case.lengths, case.block_table, 1)
        prefix = step.plan.prefix
        assert (prefix is not None) == (requests >= 3)
        assert prefix is None or int((prefix.prefix_tile >= 0).sum()) == 3
        # not step.attend: it promises that other kernels come between planning and a layer
        tensors = (case.q_latent, case.q_rope, case.kv_latent, case.kv_rope, step.block_table)
        found = mla_decode(*tensors, step.plan, step.selection, scale=SCALE)
        assert_close(found, expected(case))


PLANTED = {
    "the planner's end is not waited for": (
        "mla_decode.cu",
        "    if (!p.prefetch_safe) wait_on_dependent_grids();\n",
        "",
        r"race: .*split_plan\.cu:\d+ .*split_plan, CTA 0, thread \d+\) writes.*"
        r"nothing orders the two",
    ),
    "a proxy fence dropped before a product": (
        "mla_decode.cu",
        "    tma_store_fence();\n    __syncwarp();",
        "    __syncwarp();",
        r"missing proxy fence: decode_steps\.cuh:\d+ `.*wgmma_m64n256k16\(.* a wgmma reads .*, "
        r"which decode_steps\.cuh:\d+ `(stmatrix|\*reinterpret_cast)",
    ),
    "an arrival lost": (
        "mla_decode.cu",
        "if (at.lane == 0) s.p_ready[buffer].arrive();",
        "if (at.lane == 0 && at.warp) s.p_ready[buffer].arrive();",
        r"deadlock: .* wait at mla_decode\.cu:\d+ `s\.p_ready\[buffer\]\.wait\(.*lacks 1 of 4 "
        r"arrivals and 0 bytes",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(use: Use, tmp_path: Path, seed: int, mistake: str) -> None:
    """The call that passes without it fails; the report says what is wrong, and where."""
    file, right, wrong, report = PLANTED[mistake]
    use(plant(KERNELS, tmp_path, file, right, wrong))
    with pytest.raises((AssertionError, RuntimeError), match=report):
        check(MlaSpec(4, 112), [1, 0, 65, 300], seed, sms=4)


def test_a_stale_tensor_map_is_named(use: Use, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Maps that are kept longer than the cache that they were made for."""
    use()
    kept: dict[int, Any] = {}
    maps = mla_sm90._maps

    def first_maps(cache: torch.Tensor) -> Any:
        return kept.setdefault(cache.shape[2], maps(cache))

    monkeypatch.setattr(mla_sm90, "_maps", first_maps)
    spec = MlaSpec(4, 64)
    planner = MlaPlanner(forced(spec, "sm90", 2))
    case = make_case(spec, [70], seed=seed)
    stored = torch.cat([case.kv_latent, case.kv_rope], -1)
    memory = bytearray(stored.nbytes)  # nobody else is given it when the cache has gone
    cache = torch.frombuffer(memory, dtype=stored.dtype).view(stored.shape)
    cache.copy_(stored)
    case.kv_latent, case.kv_rope = cache[..., :512], cache[..., 512:]
    assert_close(run_case(case, planner), expected(case))
    del case, cache
    with pytest.raises(RuntimeError, match=r"stale pointer: latent\.map of mla_decode"):
        run_case(make_case(spec, [70], seed=seed), planner)
