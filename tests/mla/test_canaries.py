"""Known bugs, planted: the checks of this folder must see each, after passing without it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton.language as tl

from mla_backend import combine
from mla_backend.decode import sm90 as mla_sm90
from mla_backend.kernels import combine as combine_kernels
from mla_backend.kernels import mla_decode as kernels
from mla_backend.plan import MlaPlanner
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import MlaCase, assert_close, expected, forced, make_case, run_case


def check(case: MlaCase) -> None:
    planner = MlaPlanner(forced(case.spec, "triton"))
    assert_close(run_case(case, planner), expected(case))


@pytest.fixture
def case(device: torch.device, seed: int) -> MlaCase:
    """Tiles with one split and with several."""
    return make_case(MlaSpec(4, 16), [400, 30, 129], seed=seed, device=device)


@pytest.mark.interpreter  # compiled kernels keep the constants they were built with
@pytest.mark.parametrize("module", [kernels, combine_kernels], ids=["decode", "combine"])
def test_an_lse_in_base_2_shows(
    case: MlaCase, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case)
    monkeypatch.setattr(module, "LN2", tl.constexpr(1.0))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(case)


@pytest.mark.interpreter  # compiled kernels keep the constants they were built with
def test_partials_in_base_e_show(case: MlaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case)
    monkeypatch.setattr(kernels, "LOG2E", tl.constexpr(1.0))
    with pytest.raises(AssertionError):
        check(case)


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_token_beyond_a_pages_end_shows(device: torch.device, seed: int, page_size: int) -> None:
    """One more key than the request has: the next row of its page, or an unused table entry's."""
    case = make_case(MlaSpec(4, page_size), [page_size + 5, 40], seed=seed, device=device)
    check(case)
    case.lengths += 1
    planner = MlaPlanner(forced(case.spec, "triton"))
    got = run_case(case, planner)
    case.lengths -= 1
    with pytest.raises(AssertionError, match="NaN"):
        assert_close(got, expected(case))


def test_a_split_that_is_merged_twice_shows(case: MlaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case)
    whole = combine.combine_triton

    def twice(x: Any, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
        partial_lse[1] = partial_lse[0]
        partial_out[1] = partial_out[0]
        whole(x, partial_out, partial_lse)

    monkeypatch.setattr(combine, "combine_triton", twice)
    with pytest.raises(AssertionError):
        check(case)


def test_a_tensor_map_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is used again with another shape gets a map of its own."""
    made: list[tuple[object, ...]] = []

    def record(*arguments: object) -> tuple[int, ...]:
        made.append(arguments)
        return (len(made),)

    monkeypatch.setattr(mla_sm90, "_tensor_map", record)
    mla_sm90._encode.cache_clear()
    memory = torch.zeros(8 * 64 * 576, dtype=torch.bfloat16)
    large = memory.view(8, 64, 576)[..., :512]
    few, narrow = large[:4], memory.view(16, 32, 576)[..., :512]
    maps = [mla_sm90._maps(cache) for cache in (large, few, narrow, large)]
    mla_sm90._encode.cache_clear()
    assert maps[0] == maps[3] and len(set(maps)) == 3 and len(made) == 6


def test_sinks_of_a_split_tile_count_once(device: torch.device, seed: int) -> None:
    """A sink that each split took would weigh as often as there are splits."""
    case = make_case(MlaSpec(4, 64), [400], seed=seed, device=device)
    sinks = torch.full((4,), 8.0, device=device)
    planner = MlaPlanner(forced(case.spec, "triton"))
    got = run_case(case, planner, sinks=sinks)
    assert_close(got, expected(case, sinks=sinks))
    splits = int(planner.plan(case.lengths).num_splits[-1])
    assert splits > 1
    with pytest.raises(AssertionError):
        assert_close(got, expected(case, sinks=sinks + math.log(splits)))
