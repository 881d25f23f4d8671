"""Mistakes planted in KDA's Hopper prefill; the model of tools/cuda_on_host names each: what is
wrong, and in which line."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.scratch import Scratch
from tests.kda.prefill_on_host import run_prefill
from tools.cuda_on_host.driver import GXX
from tools.cuda_on_host.planted import plant

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
WRONG_RESULT = r"(output|state).* is off by [0-9.e+-]+, allowed"


class Mistake(NamedTuple):
    """``right`` becomes ``wrong`` in ``file``; ``report`` is a pattern of what is said."""

    file: str
    right: str
    wrong: str
    report: str
    call: Mapping[str, Any] = MappingProxyType({})


PLANTED: dict[str, Mistake] = {
    "a copy that is too short": Mistake(
        "scan.cu",
        "                          TILE_BYTES, s.full[stage]);",
        "                          TILE_BYTES - 1024, s.full[stage]);",
        r"deadlock: .* wait at scan_buffers\.cuh:\d+ `full\[step % STAGES\]\.wait\(.*lacks 0 of 1 "
        r"arrivals and 1024 bytes",
    ),
    "a proxy fence dropped before a bulk copy": Mistake(
        "intra_chunk.cu",
        "        if (slice % 2) tma_store_fence();\n",
        "",
        r"missing proxy fence: intra_chunk\.cu:\d+ `bulk_copy_s2g\(tile_block\(p, tile, Q_IN.* "
        r"copy reads byte .*, which slice_rows\.cuh:\d+ `stmatrix\(",
    ),
    "a proxy fence dropped after an acquire": Mistake(
        "scan_task.cuh",
        "            fence_proxy_async();",
        "            ",
        r"missing proxy fence: scan\.cu:\d+ `bulk_copy_g2s\(.*, which (scores|intra).*no "
        r"fence\.proxy\.async",
    ),
    "a fence dropped before a counter": Mistake(
        "scan_task.cuh",
        "    __threadfence();\n",
        "",
        r"race: scan_task\.cuh:\d+ `p\.progress->\w+ .* writes byte \d+ of progress .*nothing "
        r"orders the two",
        {"lengths": (67, 5, 70)},
    ),
    "a release that is a plain store": Mistake(
        "intra_chunk.cu",
        "    if (is_leader && previous >= 0) store_release(p.progress->flags() + previous,"
        " s.launch);\n\n",
        "    if (is_leader && previous >= 0) p.progress->flags()[previous] = s.launch;\n\n",
        r"race: .*p\.progress->flags\(\)\[previous\] = s\.launch.*nothing orders",
    ),
    "a flag set before the copies have written": Mistake(
        "intra_chunk.cu",
        "    if (is_leader) tma_store_wait();\n    cp_async_wait<1>();",
        "    if (is_leader) tma_store_wait_read();\n    cp_async_wait<1>();",
        r"race: scan\.cu:\d+ `bulk_copy_g2s\(.* copy reads byte \d+ of tiles .*, which "
        r"intra_chunk\.cu:\d+ `bulk_copy_s2g\(.* copy writes",
        {"lengths": (67, 300)},
    ),
    "a wrong swizzle": Mistake(
        "chunk_rows.cuh",
        "((c % 8 ^ (r & 7)) << 4)",
        "((c % 8 ^ (r & 3)) << 4)",
        WRONG_RESULT,
    ),
    "a missing expect_tx": Mistake(
        "scan.cu",
        "s.full[stage].arrive_and_expect_tx(TILE_BYTES + D * 4);",
        "s.full[stage].arrive();",
        r"barrier: a phase of .* ends while .* no arrive_and_expect_tx expects them|"
        r"deadlock: .*lacks 0 of 1 arrivals and -\d+ bytes|"
        r"race: .* a wgmma reads .*bulk_copy_g2s.* an asynchronous copy writes",
    ),
    "a stage released early": Mistake(
        "scan_split.cu",
        "            warpgroup_wait<0>();\n            warpgroup_fence_operand(o);\n"
        "            __syncwarp();\n            if (lane == 0) s.empty[stage].arrive();",
        "            if (lane == 0) s.empty[stage].arrive();\n"
        "            warpgroup_wait<0>();\n            warpgroup_fence_operand(o);",
        r"race: scan_split\.cu:\d+ .* an asynchronous copy writes byte .*, which scan_chunk\.cuh:"
        r"\d+ `wgmma_m64n64k16_f16_rs\(.* a wgmma reads",
        {"split": True, "lengths": (300,)},
    ),
    "a release of lanes that have not met": Mistake(
        "scan_buffers.cuh",
        "        __syncwarp();\n        if (lane == 0) stored[half].arrive();",
        "        if (lane == 0) stored[half].arrive();",
        r"race: scan_chunk\.cuh:\d+ .*stmatrix_trans.*load_shared",
        {"lengths": (300,)},
    ),
    "an end of the cluster that is not waited for": Mistake(
        "scan_split.cu",
        "    cluster_sync();  // shared memory must outlive the other CTA's use of it\n",
        "",
        r"cluster: scan_split, .* accesses shared memory of CTA \d+, which has ended|"
        r"ends while the copy that scan_split\.cu:\d+ .*is on its way",
        {"split": True},
    ),
    "an off-by-one at the last chunk": Mistake(
        "task.cuh",
        "return static_cast<int>(end - begin) - c * C;",
        "return static_cast<int>(end - begin) - c * C + 1;",
        r"overrun: scan_chunk\.cuh:\d+ .*(reads|writes) \d+ bytes outside of all memory that the "
        r"launch was given, at byte \d+ of",
    ),
    "a wrong phase bit": Mistake(
        "scan_buffers.cuh",
        "values_full[i].wait((step / VALUE_STAGES) & 1);\n        load_values(",
        "values_full[i].wait((step / VALUE_STAGES + 1) & 1);\n        load_values(",
        r"race: scan_chunk\.cuh:\d+ .*(`ldmatrix_trans.*reads.*cp\.async writes|"
        r"a cp\.async writes.*`ldmatrix_trans.* reads); nothing orders",
    ),
    "a product that is not waited for": Mistake(
        "scan.cu",
        "warpgroup_wait<0>();\n            warpgroup_fence_operand(e);",
        "warpgroup_fence_operand(e);",
        r"wgmma: scan_chunk\.cuh:\d+ .* reads registers that the wgmma begun at scan_chunk\.cuh:"
        r"\d+ .* accumulates in",
    ),
    "registers that no wgmma.fence orders": Mistake(
        "scan.cu",
        "            warpgroup_fence_operand(e);\n            warpgroup_arrive();\n",
        "            warpgroup_fence_operand(e);\n",
        r"wgmma: registers of the wgmma at scan_chunk\.cuh:\d+ .* have been written since the last "
        r"warpgroup_arrive",
    ),
    "a barrier of the CTA dropped": Mistake(
        "slice_rows.cuh",
        "    exchange_rows(s, rows, at);\n    meet();\n",
        "    exchange_rows(s, rows, at);\n",
        r"race: s\w+\.cuh:\d+ .*nothing orders the two",
    ),
}

SEGMENTS = {"segment_chunks": 1, "lengths": (260,)}
PLANTED |= {
    "a transition without its decay": Mistake(
        "merge_segments.cu",
        "        decay(state, decays);\n",
        "",
        WRONG_RESULT,
        SEGMENTS,
    ),
    "an end that is not waited for": Mistake(
        "merge_segments.cu",
        "        if (lane < 4) flag = segment_flag(p, place, LOCAL_END + 4 * task.half + lane);\n"
        "        else if",
        "        if",
        r"race: merge_segments\.cu:\d+ `bulk_copy_g2s\(.*copy reads byte \d+ of segment_ends .*, "
        r"which segments\.cuh:\d+ .*nothing orders",
        SEGMENTS,
    ),
    "a sequence's state read again where it may be overwritten": Mistake(
        "scan_state.cuh",
        "    if (task.segment.count > 1) {",
        "    if (task.segment.index > 0) {",
        r"race: scan_state\.cuh:\d+ .* of state_(in|out)\.ptr .*nothing orders",
        {"in_pool": True} | SEGMENTS,
    ),
    "a count of launches that goes on while it is needed": Mistake(
        "scan.cu",
        "        if (SEGMENTS && over) s.tasks.wait_until_read(turn);",
        "",
        r"race: scan_task\.cuh:\d+ `p\.progress->launches .*nothing orders|a kernel has trapped|"
        r"deadlock",
        {"segment_chunks": 1, "lengths": (0, 70)},
    ),
    "a count of launches raised while lanes read it": Mistake(
        "scan.cu",
        "    __syncwarp();  // all lanes have read the launch's number, which lane 0 may raise\n",
        "",
        r"race: scan_task\.cuh:\d+ `p\.progress->launches .* which scan\.cu:\d+ "
        r"`const u32 launch = .* reads; nothing orders",
        {"lengths": (0, 70)},
    ),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    """The call that passes without it fails; the report says what is wrong, and where."""
    file, right, wrong, report, call = PLANTED[mistake]
    sources = plant(pipeline.KERNELS, tmp_path, file, right, wrong)
    arguments = {"lengths": (67, 130), "max_polls": 3000} | dict(call)
    with pytest.raises((AssertionError, RuntimeError), match=report) as failure:
        run_prefill(monkeypatch, seed, sources=sources, regime="weak", **arguments)
    print(failure.value)
    pipeline.fault_record().words.zero_()


@pytest.mark.interpreter
@pytest.mark.parametrize("split", [False, True], ids=["scan", "scan_split"])
def test_what_mistakes_are_planted_in_is_right(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: bool
) -> None:
    run_prefill(monkeypatch, seed, (67, 300), split=split, regime="weak")
    run_prefill(monkeypatch, seed, (0, 70), split=split, regime="weak")


@pytest.mark.interpreter
def test_what_mistakes_of_segments_are_planted_in_is_right(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    run_prefill(monkeypatch, seed, regime="weak", **SEGMENTS)
    run_prefill(monkeypatch, seed, regime="weak", in_pool=True, **SEGMENTS)
    run_prefill(monkeypatch, seed, (0, 70), regime="weak", segment_chunks=1)
    run_prefill(monkeypatch, seed, (330,), regime="weak", segment_chunks=3)


@pytest.mark.interpreter
def test_a_swapped_pointer_is_named(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The kernel finds two of its arguments in each other's place."""
    params = copy.copy(pipeline.SCAN_PARAMS)
    right = "    const u16* tiles;\n    const float* chunk_decays;\n"
    wrong = "    const float* chunk_decays;\n    const u16* tiles;\n"
    assert right in params.header
    params.header = params.header.replace(right, wrong)
    report = (
        r"overrun: scan\.cu:\d+ `bulk_copy_g2s\(s\.stage.* reads 57344 bytes outside of all memory"
    )
    with pytest.raises(RuntimeError, match=report):
        run_prefill(monkeypatch, seed, (67, 130), scan_params=params)


@pytest.mark.interpreter
def test_a_forgotten_reset_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """The first call is right. The second takes its tiles for made, and gives up."""
    right = "        p.progress->next_tile = 0;\n"
    sources = plant(pipeline.KERNELS, tmp_path, "scan_task.cuh", right, "")
    scratch = Scratch(torch.device("cpu"))
    run_prefill(monkeypatch, seed, (70,), sources=sources, scratch=scratch)
    with pytest.raises(RuntimeError, match="a kernel has trapped"):
        run_prefill(monkeypatch, seed, (70,), sources=sources, scratch=scratch, max_polls=300)
    told = pipeline.fault_record().sentence()
    pipeline.fault_record().words.zero_()
    assert told is not None and "of launch 2, whose flag holds 1" in told


def test_a_mistake_that_cannot_be_planted_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"expected once in scan\.cu, found 0 times: 'no such'"
    ):
        plant(pipeline.KERNELS, tmp_path, "scan.cu", "no such", "text")
