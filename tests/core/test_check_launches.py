"""No kernel is left out of ``kda-dsv4 check``, nor of compute-sanitizer, which makes its calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.sanitizer import our_kernels

ROOT = Path(__file__).parents[2]
HOPPERS = {
    *(("kda", name) for name in ("intra_chunk", "scan", "scan_split", "one_launch", "decode_step")),
    *(("kda", name) for name in ("segment_ends", "merge_segments", "verify_records")),
    *(("mla", name) for name in ("mla_decode", "mla_combine", "split_plan")),
    *(("mla", f"{name}_sm90_kernel") for name in ("sparse_mla", "sparse_mla_rows")),
    ("block_sparse", "block_sparse_sm90_kernel"),
}
"""In CUDA C++ and in Gluon."""
NOT_AMDS = {
    ("dsv4", "decode_prefetch_kernel"),  # no AMD table asks for it
    ("mla", "sparse_mla_combine_shares_kernel"),  # of the path in Gluon
    ("block_sparse", "quantise_values_kernel"),  # e4m3 values, which no AMD table offers
    ("block_sparse", "value_scales_kernel"),
    ("block_sparse", "value_offset_kernel"),
}


def launched(target: str) -> set[tuple[str, str]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.check_launches", target],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return {(family, kernel) for family, kernel in json.loads(done.stdout.splitlines()[-1])}


def test_the_calls_launch_every_kernel() -> None:
    ours = our_kernels()
    assert ours > HOPPERS
    assert ours - launched("H200") == set()


def test_amds_tables_launch_every_kernel_that_they_can_choose() -> None:
    assert our_kernels() - launched("MI355X") == HOPPERS | NOT_AMDS
