"""The order of warp-specialised Gluon kernels in machine code, and mistakes planted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.offline import ROOT, kept
from tools.cuda_on_host.machine_order import SOURCES, Code, roles_disorder
from tools.cuda_on_host.planted import plant

WAIT_FULL = "            mbarrier.wait(full.index(stage), (read // STAGES) & 1)\n"
SEEN = '            seen_s.index(stage).store(gl.where(m_key, 0.0, -float("inf")))\n'
FULL = "            thread_barrier()\n            mbarrier.arrive(full.index(stage), count=1)\n"
CLEARED = "            b_v = rows.load(layout)\n"
BEHIND = """gl.zeros_like(b_v)))
    fence_async_shared()
"""
ROWS = "sparse_mla_sm90 64 heads, rows"
PLANTED = {
    "a read that does not wait": (
        "sparse_mla_compute.py", WAIT_FULL, "", ROWS,
        ["a read does not wait for full", "a read after empty does not wait"],
    ),
    "a store after its stage was handed on": (
        "sparse_mla_rows.py", SEEN + FULL, FULL + SEEN, ROWS, ["a store after full does not wait"],
    ),
    "a wait for half of the stores": (
        "sparse_mla.py", "                if step == 0:", "                if step == 1:",
        "sparse_mla_sm90 16 heads, split",
        ["a store does not wait for empty", "a store after full does not wait"],
    ),
    "barriers that no role uses": (
        "block_load.py",
        "    return k_s", "    mbarrier.init(gl.allocate_shared_memory("
        "gl.int64, [1], mbarrier.MBarrierLayout()), count=1)\n    return k_s",
        "block_sparse gluon packed", ["a store over a barrier"],
    ),
    "rows cleared where others were read": (
        "block_walk.py", CLEARED, CLEARED + "            rows = v.slice(112 - 16 * i, 16, dim=0)\n",
        "block_sparse gluon packed", ["values are not stored where they were loaded"],
    ),
    "rows cleared behind no fence": (
        "block_walk.py", BEHIND, BEHIND.splitlines(keepends=True)[0], "block_sparse gluon packed",
        ["a product before the fence of what it reads"],
    ),
}  # fmt: skip


def disorder(*arguments: object) -> dict[str, list[str]]:
    cache = kept(f"triton-{triton.__version__}")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.cuda_on_host.machine_order", *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_every_path_passes_the_barriers() -> None:
    found = disorder()
    assert len(found) >= 8
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(tmp_path: Path, mistake: str) -> None:
    file, right, wrong, word, report = PLANTED[mistake]
    (package,) = (name for name, folder in SOURCES.items() if (folder / file).exists())
    folder = plant(SOURCES[package], tmp_path, file, right, wrong)
    found = disorder(package, folder, word)
    assert report in found.values()


LOOP = """\
        /*0000*/                   BSSY B0, `(.L_x_1) ;
.L_x_0:
        /*0010*/               @P0 BRA `(.L_x_2) ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x80], R2 ;
.L_x_2:
        /*0030*/                   LDS R1, [R4+UR8+0x40] ;
        /*0040*/               @P2 BRA `(.L_x_0) ;
        /*0050*/                   BSYNC B0 ;
        /*0060*/                   NOP ;
.L_x_1:
        /*0070*/                   EXIT ;
"""


ROLES = """\
        /*0000*/               @P0 BRA `(.L_x_1) ;
        //## File "f.py", line 1
        /*0010*/                   STS.64 [UR4+0x108], R2 ;
        /*0020*/                   STS [UR4+0x90], R2 ;
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0060*/                   STS.64 [UR4+0x108], R4 ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0080*/                   EXIT ;
.L_x_1:
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00a0*/                   LDS.U8 R4, [R4+0x104] ;
        /*00b0*/                   ISETP.NE.AND P1, PT, R4, 0x2, PT ;
        /*00c0*/               @P1 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00d0*/               @P1 BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*00e0*/               @P1 BRA `(.L_x_1) ;
        /*00f0*/                   LDS R5, [UR4+0x90] ;
        /*0100*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0120*/                   BRA `(.L_x_1) ;
"""
MEETING = "        /*0110*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;\n"


def test_roles_and_their_warps_count_the_same_meetings(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def start(\n")
    assert roles_disorder(Code(ROLES), tmp_path, "start") == []
    late = ROLES.replace(MEETING, "")  # a role ends without a meeting
    assert roles_disorder(Code(late), tmp_path, "start") == [
        "a role's number is stored and read at once"
    ]
    store, meeting = ROLES.splitlines(keepends=True)[3:5]
    late = ROLES.replace(store + meeting, meeting + store)
    assert roles_disorder(Code(late), tmp_path, "start") == [
        "arguments are stored and read at once"
    ]


def test_paths() -> None:
    code = Code(LOOP)
    wait, read = code.where(lambda x: x.place == 0x80), code.where(lambda x: x.opcode == "LDS")
    assert (wait, read, code.all[3].place) == ({2}, {3}, 0x40)
    assert code.reaches({-1}, read, wait)  # past the wait
    assert not Code(LOOP.replace("@P0 BRA `(.L_x_2)", "@P0 NOP")).reaches({-1}, read, wait)
    assert code.after[5] == [7]
