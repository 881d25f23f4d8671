"""What benchmarks/sanitizer.py makes of compute-sanitizer's logs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton

from benchmarks import sanitizer
from benchmarks.sanitizer_explained import (
    MEETING,
    ROOT,
    Listing,
    is_explained,
    is_followed,
    table,
)
from tools.cuda_on_host.planted import plant

LOG = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at scan(Params)+0x100
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f is out of bounds
=========
========= Invalid __global__ write of size 8 bytes
=========     at void at::native::elementwise_kernel<128, 4>(int)+0x80
=========
========= Error: Race reported between Write access at scan_split+0x10
=========     and Read access at scan_split+0x20 [4 hazards]
========= Error: Race reported between Write access at scan_split+0x10
=========     and Read access at scan_split+0x20 [2 hazards]
=========
========= ERROR SUMMARY: 4 errors
"""


def test_reports_are_counted_for_the_kernel_that_they_name(tmp_path: Path) -> None:
    found = sanitizer.reports(LOG)
    assert len(found) == 4
    said = [{"family": "kda", "kernels": ["scan", "scan_split"]}]
    said += [{"family": "kda", "kernels": ["intra_chunk"]}]
    rows = sanitizer.rows_of("racecheck", said, found, tmp_path)
    assert [(row["kernel"], row["errors"], row["unexplained"]) for row in rows] == [
        ("intra_chunk", 0, 0),
        ("scan", 1, 1),
        ("scan_split", 2, 2),
    ]
    assert rows[0]["reports"] == []
    assert rows[1]["reports"][0]["text"].startswith(" Invalid __global__ read of size 4 bytes")
    (twice,) = rows[2]["reports"]  # they differ in their hazards alone
    assert (twice["times"], twice["explained"]) == (2, False)
    assert "hazards" not in twice["text"]


def test_a_process_that_did_not_end_is_known() -> None:
    assert sanitizer.launched_by("loading\nended after 5 s") is None
    assert sanitizer.launched_by('x\nLAUNCHED [{"call": "a"}]\ny') == [{"call": "a"}]


def test_every_kernel_of_the_tree_is_known() -> None:
    pairs = sanitizer.our_kernels()
    # two families have kernels of this name
    assert {("kda", "decode_step_kernel"), ("dsv4", "decode_step_kernel")} <= pairs
    found = {name for _, name in pairs}
    cuda = {"intra_chunk", "scan", "scan_split", "decode_step", "mla_decode", "mla_combine"}
    triton = {"recurrent_kernel", "chunk_table_kernel", "block_sparse_sm90_kernel"}
    assert cuda | triton | {"split_plan"} <= found
    assert "shared_bytes" not in found


KERNELS = ROOT / "mla_backend" / "kernels" / "sm90"
SEEN = "b_seen = seen_s.index(stage).load("
STORE = "seen_s.index(stage).store("
ROWS = "sparse_mla_rows_sm90_kernel"


def number_of(file: str, text: str) -> int:
    (path,) = ROOT.glob(f"*_backend/kernels/sm90/{file}")
    lines = path.read_text().splitlines()
    (found,) = (n for n, line in enumerate(lines, 1) if text in line)
    return found


def race(kernel: str, *accesses: tuple[str, int, str]) -> str:
    """A report of (kind, offset, place) as racecheck writes it."""
    (kind, at, place), *others = accesses
    text = f" Error: Race reported between {kind} access at {kernel}+{at:#x}{place}"
    return text + "".join(
        f"\n     and {kind} access at {kernel}+{at:#x}{place} [4 hazards]"
        for kind, at, place in others
    )


def nothing() -> list[Any]:
    raise AssertionError("no listing is needed")


def test_a_pair_of_triton_is_known_by_its_lines() -> None:
    """compute-sanitizer says the kernel's file, and the line in another where that was inlined."""
    read = ("Read", 0x90, f" in sparse_mla_rows.py:{number_of('sparse_mla_compute.py', SEEN)}")
    line = number_of("sparse_mla_rows.py", STORE)
    write = ("Write", 0x20, f" in sparse_mla_rows.py:{line}")
    other = ("Write", 0x30, f" in sparse_mla_rows.py:{line - 1}")
    again = ("Write", 0x90, read[2])

    def explained(*accesses: tuple[str, int, str]) -> bool:
        return is_explained("racecheck", ROWS, race(ROWS, *accesses), nothing)

    assert explained(read, write)
    assert explained(write, read)
    assert explained(read, write, write)
    assert not explained(read, write, other)
    assert not explained(read, other)
    assert not explained(again, write)
    assert not explained(write, write)
    assert not explained(read)
    assert not is_explained("memcheck", ROWS, race(ROWS, read, write), nothing)
    assert not is_explained("racecheck", "scan", race("scan", read, write), nothing)


def test_arguments_of_roles_may_be_read_but_not_overwritten() -> None:
    kernel = "block_sparse_sm90_kernel"
    place = f" in block_sparse.py:{number_of('block_sparse.py', 'def _run(')}"
    write, read, over = ("Write", 0x40, place), ("Read", 0x10, place), ("Write", 0x30, place)
    assert is_explained("racecheck", kernel, race(kernel, write, read), nothing)
    assert not is_explained("racecheck", kernel, race(kernel, write, read, over), nothing)
    number = f" in block_sparse.py:{number_of('block_sparse.py', f'def {kernel}(')}"
    read, end = ("Read", 0x10, number), ("Write", 0x30, number)
    assert is_explained("racecheck", kernel, race(kernel, read, write), nothing)
    assert is_explained("racecheck", kernel, race(kernel, read, end), nothing)  # Triton 3.8
    assert not is_explained("racecheck", kernel, race(kernel, end, end), nothing)


def test_lanes_may_store_a_sum_at_one_address() -> None:
    kernel = "decode_step_kernel"
    delta = ROOT / "kda_backend" / "kernels" / "functions" / "delta.py"
    sums = Path(triton.language.standard.__file__)  # with tl.sum
    for file, text in ((delta, "tl.reduce(products"), (sums, "(input, axis, _sum_combine")):
        lines = enumerate(file.read_text().splitlines(), 1)
        place = f" in {file.name}:{next(number for number, line in lines if text in line)}"
        write, read = ("Write", 0x40, place), ("Read", 0x40, place)
        assert is_explained("racecheck", kernel, race(kernel, write, write), nothing)
        assert not is_explained("racecheck", kernel, race(kernel, write, read), nothing)


STEP = {0x470: "SYNCS.EXCH.64 URZ, [UR6], UR4", 0x480: "SYNCS.ARRIVE.TRANS64 RZ, [UR6], R6"}


def test_a_pair_of_cuda_is_known_by_its_instructions() -> None:
    def explained(*listings: dict[int, str]) -> bool:
        report = race("decode_step", ("Write", 0x470, ""), ("Read", 0x480, ""))
        return is_explained("racecheck", "decode_step", report, lambda: listings)

    assert explained(STEP)
    assert explained({0x470: "NOP"}, STEP)
    assert not explained()
    assert not explained({0x470: STEP[0x470]}, {0x480: STEP[0x480]})  # of one variant
    assert not explained({0x470: STEP[0x480], 0x480: STEP[0x470]})


SCAN = {
    0x10: "LDSM.16.MT88.4 R8, [R4]",
    0x20: f"NOP {MEETING}",
    0x30: "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ], RZ",
    0x40: "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R6.64], !P0",
}


def test_a_pair_that_has_to_meet_is_known_by_what_follows() -> None:
    def explained(listing: Listing, first: int = 0x10) -> bool:
        report = race("scan", ("Read", first, ""), ("Write", 0x40, ""))
        return is_explained("racecheck", "scan", report, lambda: [listing])

    assert explained(SCAN)
    assert not explained(SCAN | {0x20: "NOP"})
    assert not explained({0x18 if at == 0x30 else at: text for at, text in SCAN.items()})
    assert not explained({at: text for at, text in SCAN.items() if at != 0x30})
    assert not explained(SCAN | {0x8: "LDS R4, [R4]"}, 0x8)


def test_every_explanation_is_of_a_kernel_and_a_line_that_there_are() -> None:
    kernels = {name for _, name in sanitizer.our_kernels()}
    files = [*ROOT.glob("*_backend/kernels/**/*.py"), Path(triton.language.standard.__file__)]
    sources = "".join(file.read_text() for file in files)
    for row in table():
        assert row["tool"] in sanitizer.TOOLS
        assert row["kernel"] in kernels
        if row["kernel"].endswith("_kernel"):
            assert all(text.partition(" ")[2] in sources for text in row["at"])


def machine_code(kernel: str, folder: Path | None = None) -> Listing:
    """Of a kernel's first variant, from another folder's sources if there is one."""
    pytest.importorskip("tests.core.test_nvrtc")
    from tests.benchmarks import replay_sanitizer as replay

    source, *of = next(replay.sources(kernel))
    source = folder / source.name if folder else source
    return replay.listing(source, source.read_bytes(), *of)


def test_a_listing_has_the_instructions_of_a_cubin() -> None:
    found = machine_code("one_launch")
    assert any(text.startswith(("NOP", "WARPSYNC")) and MEETING in text for text in found.values())
    assert any(text.startswith("HGMMA") for text in found.values())


KDA = ROOT / "kda_backend" / "kernels" / "sm90"
MUST_MEET = [row for row in table() if "then" in row]
LANES_PART = {
    "scan": (
        KDA, "scan_buffers.cuh",
        "        __syncwarp();\n        if (at.lane == 0) values_empty",
    ),
    "scan_split": (
        KDA, "scan_split.cu",
        """            warpgroup_fence_operand(state);
            __syncwarp();
            if (lane == 0) s.empty[stage].arrive();""",
    ),
    "segment_ends": (
        KDA, "segment_ends.cu", "        __syncwarp();\n        if (at.lane == 0) s.empty",
    ),
    "mla_decode": (
        KERNELS, "mla_decode.cu",
        "    __syncwarp();\n    if (at.lane == 0) s.p_ready",
    ),
}  # fmt: skip
"""Folder, file and text of the meeting that each kernel's row asks for."""


@pytest.mark.parametrize("kernel", LANES_PART)
def test_lanes_meet_before_one_arrives_for_them(kernel: str, tmp_path: Path) -> None:
    """In the machine code as it is. Without ``__syncwarp`` no row explains all of the reads any
    more; scan_split's before the loop still meet at its other one, in front of the handoff."""
    folder, file, text = LANES_PART[kernel]
    rows = [row for row in MUST_MEET if row["kernel"] == kernel]
    assert rows

    def followed(listing: Listing) -> list[int]:
        counts = []
        for row in rows:
            pattern = row["at"][0].partition(" ")[2]
            found = [at for at, text in listing.items() if re.search(pattern, text)]
            counts.append(sum(is_followed(at, row["then"], listing) for at in found))
        return counts

    met = followed(machine_code(kernel))
    folder = plant(folder, tmp_path, file, text, text.replace("__syncwarp();", ""))
    parted = followed(machine_code(kernel, folder))
    assert all(less < count for less, count in zip(parted, met, strict=True)), (parted, met)


def test_every_row_that_asks_for_a_meeting_is_tried() -> None:
    assert {row["kernel"] for row in MUST_MEET} == LANES_PART.keys()
