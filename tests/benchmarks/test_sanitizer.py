"""What benchmarks/sanitizer.py makes of compute-sanitizer's logs."""

from __future__ import annotations

from benchmarks import sanitizer

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
========= Error: Race reported between Write access at scan_split+0x30
=========     and Read access at scan_split+0x40 [2 hazards]
=========
========= ERROR SUMMARY: 4 errors
"""


def test_reports_are_counted_for_the_kernel_that_they_name() -> None:
    found = sanitizer.reports(LOG)
    assert len(found) == 4
    said = [{"family": "kda", "kernels": ["scan", "scan_split"]}]
    said += [{"family": "kda", "kernels": ["intra_chunk"]}]
    rows = sanitizer.rows_of("memcheck", said, found)
    assert [(row["kernel"], row["errors"]) for row in rows] == [
        ("intra_chunk", 0),
        ("scan", 1),
        ("scan_split", 2),
    ]
    assert rows[1]["report"].startswith(" Invalid __global__ read of size 4 bytes")
    assert rows[0] == {
        "family": "kda",
        "kernel": "intra_chunk",
        "tool": "memcheck",
        "errors": 0,
        "report": "",
    }


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
