"""MLA decode on Hopper on the CPU: planner, main kernel and combine from their own sources, one
stream (tools/cuda_on_host), against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_backend import combine
from mla_backend.decode import sm90 as mla_sm90
from mla_backend.plan import MlaPlanner, planner
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import assert_close, expected, forced, make_case, run_case
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
) -> tuple[int, ...]:
    """The model's, in place of cuTensorMapEncodeTiled's."""
    return (MAP_MAGIC, address, *extents, *strides, rows, *([0] * 8))


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

        def main(rows: int, evict_first: bool) -> Any:
            return kernel("mla_decode", mla_sm90, mla_sm90.defines(rows, evict_first))

        monkeypatch.setattr(planner, "_sm90_kernel", lambda: kernel("split_plan", planner, {}))
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


def test_more_rows_than_a_tile(use: Use, seed: int) -> None:
    use()
    check(MlaSpec(66, 64), [130], seed, sms=4)


@pytest.mark.parametrize("overhead", [1, 4])
def test_a_shared_prefix_and_sinks(use: Use, seed: int, overhead: int) -> None:
    """Two levels: the rows of all requests meet the prefix in tiles of their own."""
    use()
    spec = MlaSpec(17, 16)
    case = make_case(spec, [200, 133, 64, 201], seed=seed, shared_tokens=128)
    sinks = torch.linspace(-2, 2, 17)
    selection = forced(spec, "sm90", 4, prefix_overhead=overhead)
    planner = MlaPlanner(selection, shared_prefix_tokens=64)
    assert_close(run_case(case, planner, sinks=sinks), expected(case, sinks=sinks))


PLANTED = {
    "the planner's end is not waited for": (
        "mla_decode.cu",
        "    if (!p.prefetch_safe) wait_on_dependent_grids();\n",
        "",
        r"race: .*split_plan\.cu:\d+ .*split_plan, CTA 0, thread \d+\) writes.*"
        r"nothing orders the two",
    ),
    "the main kernel's end is not waited for": (
        "mla_combine.cu",
        "    wait_on_dependent_grids();\n    launch_dependent_grids();\n    const float* from =",
        "    const float* from =",
        r"race: .*partial_(out|lse) of mla_decode.*nothing orders the two",
    ),
    "a barrier's fence dropped": (
        "mla_decode.cu",
        "        fence_barrier_init();\n",
        "",
        r"missing barrier fence: mla_decode\.cu:\d+ `tma_load_3d\(.*which mla_decode\.cu:\d+ .*"
        r"rope_full\[i\]\.init\(1\)",
    ),
    "a proxy fence dropped before a product": (
        "mla_decode.cu",
        "                tma_store_fence();\n                __syncwarp();",
        "                __syncwarp();",
        r"missing proxy fence: mla_decode\.cu:\d+ `.*wgmma_m64n256k16\(.* a wgmma reads .*, which "
        r"mla_decode\.cu:\d+ `(stmatrix|\*reinterpret_cast)",
    ),
    "more bytes expected than come": (
        "mla_decode.cu",
        "full.arrive_and_expect_tx(whole ? BOX : valid * PIECE * 128);",
        "full.arrive_and_expect_tx(BOX);",
        r"deadlock: .* wait at mla_decode\.cu:\d+ `.*_full.*wait\(.*lacks 0 of 1 "
        r"arrivals and \d+ bytes",
    ),
    "an arrival lost": (
        "mla_decode.cu",
        "if (at.lane == 0) s.p_ready[buffer].arrive();",
        "if (at.lane == 0 && at.warp) s.p_ready[buffer].arrive();",
        r"deadlock: .* wait at mla_decode\.cu:\d+ `s\.p_ready\[buffer \^ 1\]\.wait\(.*lacks 1 of 4 "
        r"arrivals and 0 bytes",
    ),
    "a wrong swizzle": (
        "mla_decode.cu",
        "((chunk ^ (row & 7)) << 4); }",
        "((chunk ^ (row & 6)) << 4); }",
        r"relative error of the output",
    ),
    "a barrier of the CTA dropped": (
        "mla_combine.cu",
        "= y;\n    __syncthreads();\n    if (threadIdx.x < 32) {",
        "= y;\n    if (threadIdx.x < 32) {",
        r"race: mla_combine\.cu:\d+ .*__shared__ variables of CTA \d+ of mla_combine, which "
        r".*nothing orders the two",
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
