"""The torch path of a compressor's step: step plans resolved row by row, by the definition.

It runs where there is no GPU, and kernels are compared with it. It reads step plans on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4_backend import reference
from dsv4_backend.compressor.bound import CompressorCall
from dsv4_backend.spec import CompressorSpec
from dsv4_backend.step_plan import CompressorStepPlan


@dataclass(frozen=True)
class Window:
    """A window to pool: its last token, and where its rows come from.

    Attributes:
        token: input row of the last token.
        seq_len: tokens of the sequence up to and with it, a multiple of the ratio.
        rows: for each of the window's rows its (page, row) in the state, or an input row, or
            ``None`` before the sequence's start.
        slot: cache slot of the result; < 0 stores nothing.
    """

    token: int
    seq_len: int
    rows: tuple[tuple[int, int] | int | None, ...]
    slot: int


class TorchStep:
    """A decode or prefill step in torch, bound like the kernels' pipelines.

    Attributes:
        dtype: of the arithmetic.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype

    def __call__(self, call: CompressorCall, step_plan: CompressorStepPlan) -> None:
        step(call, step_plan, self.dtype)

    def warm_up(self, call: CompressorCall, step_plan: CompressorStepPlan) -> None:
        """Nothing to compile."""


def step(
    call: CompressorCall, step_plan: CompressorStepPlan, dtype: torch.dtype = torch.float64
) -> None:
    """Pool and store every window that ends in this call, then write the state rows."""
    layer, state = call.layer, call.state
    spec = layer.spec
    todo = [w for w in windows(step_plan, spec, state.shape[1]) if w.slot >= 0]
    if todo:
        pooled = torch.stack([_pool(w, call, step_plan.state_layout, dtype) for w in todo])
        firsts = [w.seq_len - spec.compress_ratio for w in todo]
        positions = torch.tensor(firsts, device=pooled.device)
        data, scales = reference.quantise(reference.finish_rows(pooled, positions, layer), spec)
        slots = torch.tensor([w.slot for w in todo], device=pooled.device)
        reference.store(call.caches, slots, spec, data, scales)
    half = spec.row_width // 2
    for token, position, row in step_plan.state_writes():
        fresh = call.kv_score[token].to(torch.float32, copy=True)
        if step_plan.state_layout == "paged":
            fresh[half:] += layer.ape[position % spec.compress_ratio].float().flatten()
        state[row // state.shape[1], row % state.shape[1]] = fresh.to(state.dtype)


def windows(
    step_plan: CompressorStepPlan, spec: CompressorSpec, state_block: int
) -> Iterator[Window]:
    """The windows that a step plan completes.

    Args:
        state_block: rows of a page of the state.
    """
    r, size = spec.compress_ratio, spec.window
    for token, seq_len, rows_in_state, pages, slot in step_plan.window_ends(spec):
        if seq_len <= 0 or seq_len % r:
            continue
        rows: list[tuple[int, int] | int | None] = []
        for w in range(size):
            position = seq_len - size + w
            if position < 0:
                rows.append(None)
            elif w >= rows_in_state:
                rows.append(token - (size - 1) + w)
            elif step_plan.state_layout == "ring":
                rows.append((pages[0] if w < size - r else pages[1], w % r))
            else:
                rows.append((pages[position // state_block], position % state_block))
        yield Window(token, seq_len, tuple(rows), slot)


def _pool(
    window: Window, call: CompressorCall, state_layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """[head_dim]: the window's rows, scores with APE, pooled."""
    spec, kv_score = call.layer.spec, call.kv_score
    d, half = spec.head_dim, spec.row_width // 2
    kv = torch.zeros((spec.window, d), dtype=dtype, device=kv_score.device)
    score = torch.full_like(kv, -torch.inf)
    for w, where in enumerate(window.rows):
        if where is None:
            continue
        row = kv_score[where] if isinstance(where, int) else call.state[where]
        group = w // spec.compress_ratio
        first = group * d
        kv[w] = row[first : first + d].to(dtype)
        score[w] = row[half + first : half + first + d].to(dtype)
        if isinstance(where, int) or state_layout != "paged":
            score[w] += call.layer.ape[w % spec.compress_ratio, group].to(dtype)
    return reference.pool(kv, score)
