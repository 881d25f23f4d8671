"""Compile the kernel that stores checkpoints for one architecture, without a GPU, to JSON."""

from __future__ import annotations

import json
import sys

import torch

from kda_backend.layer_checkpoints import _kernel
from tests.kda import compile_report

if __name__ == "__main__":
    compile_report._POINTERS["offsets_ptr"] = "*i32"
    launch, _ = _kernel(4)
    case = ("store_checkpoints bf16", launch, torch.bfloat16, "pool, snapshots")
    print(json.dumps({case[0]: compile_report.compile_case(sys.argv[1], case)}))
