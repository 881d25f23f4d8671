"""Sums over lanes in the PTX of KDA's decode and verification steps, compiled without a GPU.

``python -m tests.kda.joined_products sm90`` prints for each kernel how many values of other lanes
it takes, and how many of these are added in one instruction with a multiplication. The latter are
not rounded alike in both lanes, so the lanes would get different sums.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any
from unittest import mock

from tests.kda.compile_report import cases, compile_case


def measure(compiled: Any) -> dict[str, int]:
    ptx = compiled.asm["ptx"]
    others = re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx)
    added = " ".join(re.findall(r"\bfma\.\S+\s+%\w+,(.*);", ptx))
    return {"taken": len(others), "joined": len(set(others) & set(re.findall(r"%\w+", added)))}


if __name__ == "__main__":
    arch = sys.argv[1]
    with mock.patch("tests.offline.measure", measure):
        steps = (x for x in cases(arch) if x[0].startswith(("decode_step", "verify_")))
        print(json.dumps({case[0]: compile_case(arch, case) for case in steps}))
