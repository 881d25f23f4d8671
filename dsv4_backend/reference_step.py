"""A whole step by its definition: plans resolved row by row, windows pooled, caches written.

This is what the kernels are tested against and what runs where there is no GPU. It reads plans on
the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4_backend import reference
from dsv4_backend import step_plan as plans
from dsv4_backend.spec import CompressorLayer, CompressorSpec


@dataclass(frozen=True)
class Window:
    """A window to pool: its last token, and where its rows before ``token`` come from.

    Attributes:
        token: input row of the last token.
        seq_len: tokens of the sequence up to and with it, a multiple of the ratio.
        rows: for each of the window's rows its (page, row) in the state, or an input row, or
            ``None`` before the sequence's start.
        slot: cache slot of the result.
    """

    token: int
    seq_len: int
    rows: tuple[tuple[int, int] | int | None, ...]
    slot: int


def compress_in_place(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rope_table: torch.Tensor,
    plan: plans.SeqLens | plans.RowPlan,
    compress_ratio: int,
    rotate: bool,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Norm, RoPE and rotation of the planned rows of kv, in place; rounded once, to kv's dtype."""
    if isinstance(plan, plans.SeqLens):
        entries = list(enumerate(plan.seq_lens.tolist()))
    else:
        entries = [(row, position + 1) for row, _, position, _ in plan.rows.tolist()]
    entries = [e for e in entries if e[0] >= 0 and e[1] > 0 and e[1] % compress_ratio == 0]
    if not entries:
        return
    rows = torch.tensor([row for row, _ in entries], device=kv.device)
    positions = torch.tensor([n - compress_ratio for _, n in entries], device=kv.device)
    done = reference.finish(
        kv[rows].to(dtype),
        positions,
        weight,
        rope_table,
        eps=eps,
        rope_layout="interleaved",
        rotate=rotate,
        rounding="sglang",
    )
    kv[rows] = done.float().to(kv.dtype)


def step(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    plan: plans.DecodePlan | plans.PrefillPlan,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Pool and store every window that ends in this call, then write the state rows."""
    spec = layer.spec
    todo = [w for w in windows(plan, spec, state.shape[1]) if w.slot >= 0]
    if todo:
        pooled = torch.stack([_pool(w, layer, kv_score, state, plan, dtype) for w in todo])
        positions = torch.tensor([w.seq_len - spec.compress_ratio for w in todo])
        done = reference.finish_rows(pooled, positions.to(pooled.device), layer)
        data, scales = reference.quantise(done, spec, layer.fp8_scale)
        slots = torch.tensor([w.slot for w in todo])
        reference.store(cache, slots, spec.page_tokens, data, scales)
    half = spec.row_width // 2
    for token, position, page, row in writes(plan, spec, state.shape[1]):
        fresh = kv_score[token].to(torch.float32, copy=True)
        if plan.layout == "paged":
            fresh[half:] += layer.ape[position % spec.compress_ratio].float().flatten()
        state[page, row] = fresh.to(state.dtype)


def _pool(
    window: Window,
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    plan: plans.DecodePlan | plans.PrefillPlan,
    dtype: torch.dtype,
) -> torch.Tensor:
    spec = layer.spec
    d, half = spec.head_dim, spec.row_width // 2
    kv = torch.zeros((spec.window, d), dtype=dtype, device=kv_score.device)
    score = torch.full_like(kv, -torch.inf)
    for w, where in enumerate(window.rows):
        if where is None:
            continue
        row = kv_score[where] if isinstance(where, int) else state[where]
        group = w // spec.compress_ratio
        first = group * d
        kv[w] = row[first : first + d].to(dtype)
        score[w] = row[half + first : half + first + d].to(dtype)
        if isinstance(where, int) or plan.layout != "paged":
            score[w] += layer.ape[w % spec.compress_ratio, group].to(dtype)
    return reference.pool(kv, score)


def windows(
    plan: plans.DecodePlan | plans.PrefillPlan, spec: CompressorSpec, state_block: int
) -> Iterator[Window]:
    """The windows that a plan completes, paddings left out."""
    r, size = spec.compress_ratio, spec.window
    for token, seq_len, buffer_len, pages, slot in _ends(plan, spec):
        if seq_len <= 0 or seq_len % r:
            continue
        rows: list[tuple[int, int] | int | None] = []
        for w in range(size):
            position = seq_len - size + w
            if position < 0:
                rows.append(None)
            elif w >= buffer_len:
                rows.append(token - (size - 1) + w)
            elif plan.layout == "ring":
                rows.append((pages[0] if w < size - r else pages[1], w % r))
            elif plan.layout == "ring_v1":
                rows.append((pages[0], position % size))
            else:
                rows.append((pages[position // state_block], position % state_block))
        yield Window(token, seq_len, tuple(rows), slot)


def _ends(
    plan: plans.DecodePlan | plans.PrefillPlan, spec: CompressorSpec
) -> Iterator[tuple[int, int, int, list[int], int]]:
    """(token, seq_len, rows in the state, pages, slot) of every entry that is not padding."""
    before = spec.window - 1
    slots = plan.slots.tolist()
    if isinstance(plan, plans.RingDecode):
        for n, (seq_len, write, page_0, page_1) in enumerate(plan.plan.tolist()):
            if write >= 0 and seq_len > 0:
                yield n, seq_len, before, [page_0, page_1], slots[n]
    elif isinstance(plan, plans.RingDecodeV1):
        pages = plan.pages.tolist()
        for n, seq_len in enumerate(plan.seq_lens.tolist()):
            if pages[n] >= 0 and seq_len > 0:
                yield n, seq_len, before, [pages[n]], slots[n]
    elif isinstance(plan, plans.RingPrefill):
        for seq_len, packed, page_0, page_1 in plan.windows.tolist():
            token, buffer_len = packed & 0xFFFF, (packed >> 16) & 0xFFFF
            if seq_len > 0:
                yield token, seq_len, buffer_len, [page_0, page_1], slots[token]
    elif isinstance(plan, plans.RingPrefillV1):
        pages = plan.pages.tolist()
        for token, batch, position, buffer_len in plan.windows.tolist():
            if token >= 0:
                yield token, position + 1, buffer_len, [pages[batch]], slots[token]
    else:
        requests, state_slots = plan.requests.tolist(), plan.state_slots.tolist()
        positions, table = plan.positions.tolist(), plan.block_table.tolist()
        if isinstance(plan, plans.PagedPrefill):
            ends, starts = plan.ends.tolist(), plan.query_starts.tolist()
        else:
            ends, starts = list(range(plan.num_tokens)), []
        for token in ends:
            if token < 0 or state_slots[token] < 0:
                continue
            request = requests[token]
            fresh = token - starts[request] + 1 if starts else 1
            buffer_len = max(before + 1 - fresh, 0)
            yield token, positions[token] + 1, buffer_len, table[request], slots[token]


def writes(
    plan: plans.DecodePlan | plans.PrefillPlan, spec: CompressorSpec, state_block: int
) -> Iterator[tuple[int, int, int, int]]:
    """(token, position, page, row) of every state row that a plan writes.

    The position matters to the paged plans alone and is -1 where a plan does not say it.
    """
    if isinstance(plan, plans.RingDecode):
        for n, (seq_len, location, _, _) in enumerate(plan.plan.tolist()):
            if seq_len > 0 and location >= 0:
                yield n, seq_len - 1, location // state_block, location % state_block
    elif isinstance(plan, plans.RingDecodeV1):
        pages = plan.pages.tolist()
        for n, seq_len in enumerate(plan.seq_lens.tolist()):
            if seq_len > 0 and pages[n] >= 0:
                yield n, seq_len - 1, pages[n], (seq_len - 1) % spec.window
    elif isinstance(plan, plans.RingPrefill):
        for token, location in plan.writes.tolist():
            if token >= 0 and location >= 0:
                yield token, -1, location // state_block, location % state_block
    elif isinstance(plan, plans.RingPrefillV1):
        pages = plan.pages.tolist()
        for token, batch, position, _ in plan.writes.tolist():
            if token >= 0:
                yield token, position, pages[batch], position % spec.window
    else:
        positions = plan.positions.tolist()
        for token, location in enumerate(plan.state_slots.tolist()):
            if location >= 0:
                yield token, positions[token], location // state_block, location % state_block
