"""The calls of KDA's operators that ``kda-dsv4 tune`` times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from kda_backend import chunk_kda, fused_recurrent_kda, kda_decode_step
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaShape
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.checks import forced

Call = Callable[[], object]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _tokens(lead: tuple[int, ...], heads: int) -> list[torch.Tensor]:
    """q, k, v, g and beta, bf16, standard normal."""
    shapes = [(*lead, heads, 128)] * 4 + [(*lead, heads)]
    return [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]


def _arguments(path: KernelPath, target: Target, heads: int, slots: int) -> dict[str, Any]:
    """A pool with a slot for each row, the gate of the model and one path for every grid."""
    shape = KdaShape(heads, heads, 128, 128)
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": (1 + 15 * torch.rand(heads, device=DEVICE)).log(),
        "dt_bias": torch.randn(heads * 128, device=DEVICE),
        "state_pool": torch.randn(slots, heads, 128, 128, device=DEVICE),
        "state_indices": torch.arange(slots, dtype=torch.int32, device=DEVICE),
        "selection": forced(path, target, shape),
    }


def _prefill(path: KernelPath, target: Target, grid: int, heads: int) -> Call:
    """One sequence of ``grid / heads`` chunks of 64 tokens."""
    tokens = 64 * max(1, grid // heads)
    q, k, v, g, beta = _tokens((1, tokens), heads)
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    step_plan = build_step_plan(offsets.to(DEVICE), tokens, cu_seqlens_cpu=offsets)
    arguments = _arguments(path, target, heads, 1)
    arguments |= {
        "step_plan": step_plan,
        "scratch": Scratch(q.device),
        "out": torch.empty_like(v),
    }
    return lambda: chunk_kda(q, k, v, g, beta, **arguments)


def _recurrent(path: KernelPath, target: Target, grid: int, heads: int) -> Call:
    rows = max(1, grid // heads)
    q, k, v, g, beta = _tokens((rows, 1), heads)
    arguments = _arguments(path, target, heads, rows) | {"out": torch.empty_like(v)}
    return lambda: fused_recurrent_kda(q, k, v, g, beta, **arguments)


def _step(path: KernelPath, target: Target, grid: int, heads: int, *, whole: bool) -> Call:
    rows = max(1, grid // heads)
    names = ("q", "k", "v", "g", "beta")
    tokens = dict(zip(names, _tokens((rows,), heads), strict=True))
    arguments = _arguments(path, target, heads, rows) | tokens
    if whole:
        channels = 3 * heads * 128
        arguments |= {
            "conv_state": torch.randn(rows, 3, channels, device=DEVICE).bfloat16().transpose(1, 2),
            "conv_weight": torch.randn(channels, 4, device=DEVICE),
            "norm_weight": torch.ones(128, device=DEVICE),
            "norm_gate": torch.randn(rows, heads, 128, device=DEVICE).bfloat16(),
        }
    arguments["out"] = torch.empty_like(tokens["v"])
    return lambda: kda_decode_step(**arguments)


MEASURES: dict[str, Callable[[KernelPath, Target, int, int], Call]] = {
    "prefill": _prefill,
    "recurrent": _recurrent,
    "whole_step": lambda *args: _step(*args, whole=True),
    "bare_step": lambda *args: _step(*args, whole=False),
}
