"""Without a GPU the kernels run under Triton's interpreter, which must be on when they are read."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
