"""Reports of a record of ``benchmarks/sanitizer.py`` that ``sanitizer_explained.toml`` leaves open.

    python -m tests.benchmarks.replay_sanitizer benchmarks/results/sanitizer_h200.json

Every variant of the CUDA C++ kernels that a table can choose is compiled by NVRTC, and looked up as
the script does with those that ran. So it answers on a machine without a GPU, for a record of the
sources as they are here and the same NVRTC, and ends with 1 where something is left.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.sanitizer_explained import Listing, is_explained, listing_of
from kda_backend.contract.tensors import STATES
from kda_backend.prefill import segmented_sm90
from tests.core import test_nvrtc
from tests.kda import test_cuda_compile as kda
from tests.mla import test_cuda_compile as mla

SEGMENTED = ("scan", "scan_split", "segment_ends", "merge_segments")


def sources(kernel: str) -> Iterator[tuple[Path, Any, dict[str, int]]]:
    """(source, params, defines) of a kernel's variants."""
    named = (*kda.prefill_variants(), *kda.one_launch_variants(), *mla.variants().items())
    steps = [(kda.step_variant(*shape, kind)) for shape in kda.SHAPES for kind in kda.STEPS]
    for source, params, defines in (*steps, *(variant for _, variant in named)):
        if source.stem == kernel:
            yield source, params, dict(defines)
    if kernel in SEGMENTED:
        folder = segmented_sm90.KERNELS
        for of_variant in product((False, True), STATES):
            of = segmented_sm90.segment_defines(*of_variant)
            yield folder / f"{kernel}.cu", segmented_sm90.SEGMENT_PARAMS, of


def listing(source: Path, text: bytes, params: Any, defines: dict[str, int]) -> Listing:
    """The machine code of a variant with this text in the source's place."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(test_nvrtc.compiled(source, text, params, defines))
        file.flush()
        return listing_of(Path(file.name))


@cache
def listings(kernel: str) -> list[Listing]:
    return [listing(file, file.read_bytes(), *of) for file, *of in sources(kernel)]


def open_reports(record: dict[str, Any]) -> list[str]:
    return [
        f"{row['tool']} {report['text']}"
        for row in record["rows"]
        for report in row["reports"]
        if not is_explained(
            row["tool"], row["kernel"], report["text"], partial(listings, row["kernel"])
        )
    ]


if __name__ == "__main__":
    found = open_reports(json.loads(Path(sys.argv[1]).read_text()))
    print(f"{len(found)} reports are not explained", *found, sep="\n")
    sys.exit(bool(found))
