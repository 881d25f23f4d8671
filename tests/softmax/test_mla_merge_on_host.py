"""Merging inside the main kernel of MLA decode on Hopper, on the CPU (tests/cuda_on_host): two
calls in a row over one scratch memory, as two layers or a graph's replays make them, against
float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from softmax_backend import combine
from softmax_backend.api import mla_decode
from softmax_backend.launch_params import Merge, Sm90MlaParams
from softmax_backend.plan import MlaPlanner, planner
from softmax_backend.run import mla_sm90
from softmax_backend.scratch import Scratch
from softmax_backend.spec import MlaSpec
from softmax_backend.testing.cases import SCALE, assert_close, expected, forced, make_case
from tests.cuda_on_host.driver import GXX, HostKernel, run_launches
from tests.cuda_on_host.planted import plant
from tests.softmax.test_mla_on_host import INSTRUCTIONS, KERNELS, tensor_map

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
Results = list[tuple[torch.Tensor, torch.Tensor]]
PATIENT = 1 << 20
"""Looks at a word before a CTA leaves: never here. With 0 every CTA leaves that has to wait."""


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """The results of a plan and two calls that merge in the main kernel, under one schedule."""

    def twice(
        spec: MlaSpec,
        lengths: list[int],
        seed: int,
        merge: Merge,
        *,
        sms: int = 4,
        polls: int = PATIENT,
        sources: Path = KERNELS,
        schedule: int | None = None,
        sinks: torch.Tensor | None = None,
        **ring: int,
    ) -> Results:
        def kernel(name: str, module: Any, defines: dict[str, int]) -> HostKernel:
            source = sources / f"{name}.cu"
            return HostKernel(source, name, module.PARAMS, defines, instructions=INSTRUCTIONS)

        def main(*form: Any) -> HostKernel:
            return kernel("mla_decode", mla_sm90, {**mla_sm90.defines(*form), "POLLS": polls})

        monkeypatch.setattr(planner, "_sm90_kernel", lambda: kernel("split_plan", planner, {}))
        monkeypatch.setattr(mla_sm90, "_kernel", main)
        monkeypatch.setattr(mla_sm90, "_tensor_map", tensor_map)
        monkeypatch.setattr(combine, "combine_sm90", None)  # nobody calls it
        mla_sm90._encode.cache_clear()
        case = make_case(spec, lengths, seed=seed)
        selection = forced(spec, "sm90", sms, merge=merge, **ring)  # type: ignore[arg-type]
        plan = MlaPlanner(selection).plan(case.lengths, case.block_table)
        scratch = Scratch(torch.device("cpu"))
        for tensor in scratch.reserve(plan.num_slots, max(spec.query_rows, 64), 512):
            tensor.fill_(float("nan"))
        found = []
        for _ in range(2):
            out = torch.full((*case.q_latent.shape[:3], 512), float("nan"), dtype=spec.dtype)
            found.append(
                mla_decode(
                    *(case.q_latent, case.q_rope, case.kv_latent, case.kv_rope),
                    *(case.block_table, plan, selection),
                    scale=SCALE,
                    sinks=sinks,
                    out=out,
                    lse=torch.full(out.shape[:3], float("nan")),
                    scratch=scratch,
                )
            )
        run_launches(seed if schedule is None else schedule)
        mla_sm90._encode.cache_clear()
        for result in found:
            assert_close(result, expected(case, sinks=sinks))
        assert not scratch.zero_words(1 << 4).any()
        return found

    return twice


@pytest.mark.parametrize("merge", ["last", "together"])
def test_requests_that_share_ctas(twice: Callable[..., Results], seed: int, merge: Merge) -> None:
    """A CTA ends one request's splits and begins another's; an empty request, and one alone; sinks
    take no part in the LSE."""
    twice(MlaSpec(6, 16), [300, 1, 0, 333], seed, merge, sinks=torch.linspace(-2, 2, 6))


@pytest.mark.parametrize("merge", ["last", "together"])
def test_many_splits_of_a_row(twice: Callable[..., Results], seed: int, merge: Merge) -> None:
    """More than a warp merges by itself, and two query tokens of which one sees less."""
    twice(MlaSpec(2, 64, query_tokens=2), [600], seed, merge, sms=10)


@pytest.mark.parametrize("heads", [16, 4])
def test_rope_parts_by_a_warp_of_their_own(
    twice: Callable[..., Results], seed: int, heads: int
) -> None:
    """Six half-block slots and two RoPE slots at 16 heads, more blocks in a CTA than there are."""
    twice(MlaSpec(heads, 112), [450, 65, 190], seed, "together", sms=2, rope_warp=True)


@pytest.mark.parametrize("blocks", [2, 8])
def test_blocks_that_come_to_the_cache_first(
    twice: Callable[..., Results], seed: int, blocks: int
) -> None:
    """More blocks in a CTA than a warp holds pages of, some across pages, a request of its own."""
    twice(MlaSpec(4, 112), [700, 100], seed, "last", sms=1, prefetch_blocks=blocks)


def test_two_tiles_of_rows(twice: Callable[..., Results], seed: int) -> None:
    """Each tile of 64 rows has a word of its own."""
    twice(MlaSpec(66, 64), [130], seed, "together", sms=4)


def test_whoever_waits_in_vain_leaves(twice: Callable[..., Results], seed: int) -> None:
    """The last to come merges all rows then; to the last bit the same, in any order of arrival."""
    spec, results = MlaSpec(4, 64), []
    kinds: list[tuple[Merge, int]] = [("together", PATIENT), ("together", 0), ("last", 0)]
    for (merge, polls), schedule in itertools.product(kinds, (1, 2)):
        results += twice(spec, [700], seed, merge, sms=3, polls=polls, schedule=schedule)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


ARRIVALS, MAIN = "mla_arrivals.cuh", "mla_decode.cu"
PLANTED: dict[str, tuple[Merge, str, str, str, str]] = {
    "a half slot is released before its values are multiplied": (
        *("last", MAIN, "                    multiply_values(s, o, at, ring, keep);\n"),
        "                    if (at.lane == 0) s.half_empty[ring.half(at.wg)].arrive();\n"
        "                    multiply_values(s, o, at, ring, keep);\n",
        r"race: .*tma_load_3d\(.*an asynchronous copy writes .*which .*multiply_values|wgmma",
    ),
    "a RoPE slot is released before its P is multiplied": (
        *("last", MAIN, "                    multiply_values(s, o, at, ring, keep);\n"),
        "                    if (at.lane == 1) s.rope_empty[ring.rope()].arrive();\n"
        "                    multiply_values(s, o, at, ring, keep);\n",
        r"race: .*tma_load_3d\(.*an asynchronous copy writes",
    ),
    "the RoPE warp does not wait for its slot": (
        *("last", MAIN, "s.rope_empty[ring.rope()].wait(ring.rope_parity() ^ 1);"),
        ";",
        r"race: .*tma_load_3d\(.*an asynchronous copy writes",
    ),
    "the pages of other blocks in the ring": (
        *("last", MAIN, "pages, base + AHEAD, all.stop, lane);"),
        "pages, base + AHEAD - 1, all.stop, lane);",
        r"relative error of the output",
    ),
    "the word is not cleared": (
        *("last", MAIN, "        if (clears) *word = 0;\n", ""),
        r"NaN in the output",
    ),
    "the word is cleared by the first": (
        *("together", ARRIVALS, "clears = atomicAdd(word, DONE) / DONE + 1 == splits;"),
        "clears = atomicAdd(word, DONE) / DONE == 0;",
        r"race: .*arrivals|NaN in the output|deadlock",
    ),
    "no release": (
        *("last", ARRIVALS, "        fence_acq_rel();\n        of[", "        of["),
        r"race: .*partial_(out|lse) of mla_decode, which mla_decode\.cu:\d+ .*nothing orders",
    ),
    "no acquire": (
        *("last", ARRIVALS, "    fence_acq_rel();\n    if (MERGE", "    if (MERGE"),
        r"race: mla_(merge|arrivals)\.cuh:\d+ .*partial_(out|lse) of mla_decode.*nothing orders",
    ),
    "the threads have not met": (
        *("last", MAIN, "partial) {\n                sync_consumers();\n", "partial) {\n"),
        r"race: .*partial_(out|lse) of mla_decode.*nothing orders",
    ),
    "nobody waits": (
        *("together", ARRIVALS, "(seen & ARRIVED) != splits && !(seen & LEFT)", "false"),
        r"race: .*partial_(out|lse) of mla_decode.*nothing orders",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(
    twice: Callable[..., Results], tmp_path: Path, seed: int, mistake: str
) -> None:
    merge, file, right, wrong, report = PLANTED[mistake]
    with pytest.raises((AssertionError, RuntimeError), match=report):
        sources = plant(KERNELS, tmp_path, file, right, wrong)
        if "slot" in mistake:
            twice(MlaSpec(16, 64), [700], seed, merge, sms=2, sources=sources, rope_warp=True)
        elif "ring" in mistake:
            twice(MlaSpec(4, 64), [700], seed, merge, sms=1, sources=sources, prefetch_blocks=2)
        else:
            twice(MlaSpec(4, 64), [260], seed, merge, sms=3, sources=sources)


@pytest.mark.parametrize(("given", "used"), [(0, [1, 1]), (3, [1, 3])])
def test_shared_prefixes_have_an_overhead_of_their_own(
    monkeypatch: pytest.MonkeyPatch, given: int, used: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(planner, "PARAMS", SimpleNamespace(pack=lambda **fields: fields))
    monkeypatch.setattr(
        planner,
        "_sm90_kernel",
        lambda: lambda grid, block, fields, pdl: seen.append(fields["overhead"]),
    )
    case = make_case(MlaSpec(4, 64), [100, 130], shared_tokens=64)
    for tokens in (0, 64):
        selection = forced(case.spec, "sm90", 4, prefix_overhead=given)
        MlaPlanner(selection, shared_prefix_tokens=tokens).plan(case.lengths, case.block_table)
    assert seen == used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge": "all"}, "merge must be one of combine, last, together, got 'all'"),
        ({"prefix_overhead": 17}, "overhead must be 1 to 16 blocks, got 17"),
        ({"prefetch_blocks": 9}, "prefetch_blocks must be 0 to 8, got 9"),
        (
            {"prefetch_blocks": 2, "rope_warp": True},
            "prefetch_blocks must be 0 where rope_warp is true, got 2",
        ),
    ],
)
def test_a_form_that_there_is_not_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sm90MlaParams(overhead=1, min_blocks=1, evict_first=True, **change)
