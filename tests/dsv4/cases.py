"""Engines in miniature: a state and a cache with poisoned pages, and the plans of their steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from backend_core.target import KNOWN_TARGETS, Target, detect_target
from dsv4_backend import (
    CompressorLayer,
    CompressorSpec,
    PagedDecode,
    PagedPrefill,
    RingDecode,
    RingDecodeV1,
    RingPrefill,
    RingPrefillV1,
    reference,
    window_ends,
)
from dsv4_backend.spec import RECORD_BYTES
from dsv4_backend.step_plan import DecodePlan, PrefillPlan

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# Kernel tests on the CPU run, interpreted, what the Hopper table selects.
TARGET: Target = detect_target(DEVICE) if DEVICE.type == "cuda" else KNOWN_TARGETS["H200"]
POISON = 0xA5
MAX_POSITIONS = 1024

Chunk = tuple[int, int, int]
"""A request's tokens [start, end) in one call."""


def make_spec(
    cache_format: str = "fp8_ds_mla",
    ratio: int = 4,
    *,
    rounding: str = "vllm",
    rotate: bool | None = None,
    fp8: str = "ocp",
    rope_layout: str = "interleaved",
    page_tokens: int = 4,
) -> CompressorSpec:
    is_indexer = cache_format.startswith("indexer")
    return CompressorSpec(
        head_dim=128 if is_indexer else 512,
        compress_ratio=ratio,
        cache_format=cache_format,  # type: ignore[arg-type]
        page_tokens=page_tokens,
        rounding=rounding,  # type: ignore[arg-type]
        rotate=is_indexer if rotate is None else rotate,
        fp8=fp8,  # type: ignore[arg-type]
        rope_layout=rope_layout,  # type: ignore[arg-type]
    )


def rope_table(layout: str = "interleaved", generator: torch.Generator | None = None):
    """Random angles: every position has its own rotation."""
    angle = 6.3 * torch.rand(MAX_POSITIONS, 32, generator=generator)
    if layout == "split":
        return torch.cat((angle.cos(), angle.sin()), 1).to(DEVICE)
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(1).to(DEVICE)


def make_layer(spec: CompressorSpec, seed: int = 0) -> CompressorLayer:
    g = torch.Generator().manual_seed(seed)
    ape = torch.randn(spec.compress_ratio, spec.halves, spec.head_dim, generator=g)
    weight = 0.5 + torch.rand(spec.head_dim, generator=g)
    table = rope_table(spec.rope_layout, g)
    return CompressorLayer(spec, ape.to(DEVICE), weight.to(DEVICE), table, fp8_scale=0.03)


def make_history(spec: CompressorSpec, length: int, seed: int) -> torch.Tensor:
    """The projections of one sequence, [length, row_width] fp32, in bf16 precision."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(length, spec.row_width, generator=g)
    x[:, : spec.row_width // 2] *= torch.rand(length, 1, generator=g) * 8
    return reference.round_bf16(x).to(DEVICE)


@dataclass
class Engine:
    """State, cache and addressing of one compressor for a few requests.

    State rows start as NaN and cache bytes as ``POISON``: whatever reads or writes too much shows.
    """

    layout: str
    spec: CompressorSpec
    lengths: list[int]
    state_dtype: torch.dtype = torch.float32
    state_block: int = field(init=False)
    state: torch.Tensor = field(init=False)
    cache: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        spec, requests = self.spec, len(self.lengths)
        g = torch.Generator().manual_seed(3)
        windows = max(self.lengths) // spec.compress_ratio + 1
        pages = (requests * windows + spec.page_tokens - 1) // spec.page_tokens + 1
        self.slot_of = torch.randperm(pages * spec.page_tokens, generator=g)[: requests * windows]
        self.slot_of = self.slot_of.view(requests, windows)
        stride = (spec.page_bytes + 63) // 64 * 64 + 64
        self.cache = torch.full((pages, stride), POISON, dtype=torch.uint8, device=DEVICE)
        if self.layout == "paged":
            self.state_block = 4 if spec.compress_ratio == 4 else 8
            blocks = max(self.lengths) // self.state_block + 1
            self.table = torch.randperm(requests * blocks, generator=g).view(requests, blocks)
            state_pages = requests * blocks
        else:
            self.state_block = spec.compress_ratio if self.layout == "ring" else spec.window
            state_pages = requests * (spec.window // self.state_block)
        # One row more than a page holds: pages are not contiguous.
        shape = (state_pages, self.state_block + 1, spec.row_width)
        full = torch.full(shape, torch.nan, dtype=self.state_dtype, device=DEVICE)
        self.state = full[:, : self.state_block]

    def locate(self, request: int, position: int) -> tuple[int, int]:
        """(page, row) of a token in the state."""
        if self.layout == "paged":
            block = self.table[request, position // self.state_block]
            return int(block), position % self.state_block
        ring = position % self.spec.window
        per_request = self.spec.window // self.state_block
        return request * per_request + ring // self.state_block, ring % self.state_block

    def location(self, request: int, position: int) -> int:
        page, row = self.locate(request, position)
        return page * self.state_block + row

    def slot(self, request: int, seq_len: int) -> int:
        return int(self.slot_of[request, seq_len // self.spec.compress_ratio - 1])

    def expected_row(self, layer: CompressorLayer, row: torch.Tensor, position: int):
        """What the state holds for a token whose projections are ``row``."""
        row = row.float().clone()
        if self.layout == "paged":
            half = self.spec.row_width // 2
            row[half:] += layer.ape[position % self.spec.compress_ratio].flatten()
        return row.to(self.state_dtype)

    def fill_state(self, layer: CompressorLayer, request: int, history: torch.Tensor) -> None:
        """Write the tokens of ``history`` that are still of use after it."""
        start = max(0, history.shape[0] - self.spec.window)
        for position in range(start, history.shape[0]):
            page, row = self.locate(request, position)
            self.state[page, row] = self.expected_row(layer, history[position], position)

    def decode_plan(
        self, entries: list[tuple[int, int] | None], is_settled: bool = False
    ) -> DecodePlan:
        """Entries (request, seq_len), ``None`` for padding; a slot only where a window ends."""
        r = self.spec.compress_ratio
        slots, rows = [], []
        for n, entry in enumerate(entries):
            if entry is None:
                slots.append(0)
                rows.append([-1, 0, 0, 0] if n % 2 else [8, -1, 0, 0])
                continue
            request, seq_len = entry
            slots.append(self.slot(request, seq_len) if seq_len % r == 0 else 0)
            page_1, _ = self.locate(request, seq_len - 1)
            page_0, _ = self.locate(request, max(seq_len - 1 - r, 0))
            rows.append([seq_len, self.location(request, seq_len - 1), page_0, page_1])
        if self.layout == "ring":
            return RingDecode(_i32(rows).view(torch.uint8), _i64(slots), is_settled)
        if self.layout == "ring_v1":
            seq_lens = [row[0] for row in rows]
            pages = [entry[0] if entry else -1 for entry in entries]
            return RingDecodeV1(_i32(seq_lens), _i32(pages), _i64(slots), is_settled)
        return PagedDecode(
            positions=_i64([entry[1] - 1 if entry else 7 for entry in entries]),
            state_slots=_i64([self.location(e[0], e[1] - 1) if e else -1 for e in entries]),
            requests=_i32([entry[0] if entry else 0 for entry in entries]),
            block_table=self.table.int().to(DEVICE),
            slots=_i64(slots),
            is_settled=is_settled,
        )

    def prefill_plan(self, chunks: list[Chunk], padding: int = 2) -> PrefillPlan:
        """The plan of chunks that lie one after another in the input, with padded entries."""
        spec, r = self.spec, self.spec.compress_ratio
        windows, windows_1, writes, writes_1, slots = [], [], [], [], []
        tokens: list[tuple[int, int]] = []
        for request, start, end in chunks:
            for position in range(start, end):
                token = len(tokens)
                tokens.append((request, position))
                old = max(spec.window - (position - start + 1), 0)
                is_end = (position + 1) % r == 0
                slots.append(self.slot(request, position + 1) if is_end else 0)
                if is_end:
                    page_0, _ = self.locate(request, max(position - r, 0))
                    page_1, _ = self.locate(request, position)
                    windows.append([position + 1, token | old << 16, page_0, page_1])
                    windows_1.append([token, request, position, old])
                if position >= end // r * r - (r if spec.halves == 2 else 0):
                    writes.append([token, self.location(request, position)])
                    writes_1.append([token, request, position, 0])
        if self.layout == "ring":
            windows += [[-1, -1, -1, -1]] * padding
            writes += [[-1, -1]] * padding
            return RingPrefill(_i32(windows).view(-1, 4), _i32(writes).view(-1, 2), _i64(slots))
        if self.layout == "ring_v1":
            windows_1 += [[-1, -1, -1, -1]] * padding
            writes_1 += [[-1, -1, -1, -1]] * padding
            pages = _i32(list(range(len(self.lengths))))
            return RingPrefillV1(
                _i32(windows_1).view(-1, 4), _i32(writes_1).view(-1, 4), pages, _i64(slots)
            )
        # vLLM's rows of a step are its requests in this call, not the requests of this engine.
        rows = {request: row for row, (request, _, _) in enumerate(chunks)}
        positions = _i64([position for _, position in tokens])
        state_slots = _i64([self.location(*token) for token in tokens])
        starts = [0]
        for _, start, end in chunks:
            starts.append(starts[-1] + end - start)
        return PagedPrefill(
            positions=positions,
            state_slots=state_slots,
            requests=_i32([rows[request] for request, _ in tokens]),
            block_table=self.table[[request for request, _, _ in chunks]].int().to(DEVICE),
            slots=_i64(slots),
            query_starts=_i32(starts),
            ends=window_ends(positions, state_slots, len(chunks), r),
        )


def _i32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _i64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def expected_rows(layer: CompressorLayer, history: torch.Tensor) -> torch.Tensor:
    """The finished float64 rows of all windows of a sequence, by the definition."""
    pooled = reference.pool_sequence(history, layer.ape)
    positions = torch.arange(pooled.shape[0], device=DEVICE) * layer.spec.compress_ratio
    return reference.finish_rows(pooled, positions, layer)


def assert_records(engine: Engine, layer: CompressorLayer, want: dict[int, torch.Tensor]) -> None:
    """The cache holds the quantised float64 rows in exactly these slots, and poison elsewhere.

    Where a byte is not that of the row, its value must lie between those of the row moved down and
    up by what fp32 cannot tell apart; the official rounding points amplify such a difference, there
    one step of the code is allowed.
    """
    spec = engine.spec
    slots = torch.tensor(sorted(want), dtype=torch.int64)
    width, scale_width = RECORD_BYTES[spec.cache_format]
    outside = engine.cache.clone()
    poison = torch.full((1, width), POISON, dtype=torch.uint8, device=DEVICE)
    reference.store(
        outside,
        slots,
        spec.page_tokens,
        poison.expand(len(slots), -1),
        poison[:, :1].expand(len(slots), scale_width),
    )
    assert (outside == POISON).all(), "a byte outside the written slots changed"
    if not want:
        return
    rows = torch.stack([want[int(slot)] for slot in slots])
    data, scales = reference.load(engine.cache, slots, spec.page_tokens, spec.cache_format)
    # An fp32 sum of r rows of mixed signs errs by about sqrt(r) roundings of its larger terms.
    move = 2.5e-7 * spec.compress_ratio**0.5 * rows.abs().amax(1, keepdim=True)
    tries = [reference.quantise(rows + d * move, spec, layer.fp8_scale) for d in (0, 1, -1)]
    want_data, want_scales = tries[0]
    got = reference.dequantise(data, scales, spec, layer.fp8_scale)
    ideal, high, low = (reference.dequantise(*t, spec, layer.fp8_scale) for t in tries)
    equal = (data == want_data).float().mean()
    if spec.cache_format == "indexer_fp8" and spec.rounding == "sglang":
        scale, want_scale = (x.contiguous().view(torch.float32) for x in (scales, want_scales))
        torch.testing.assert_close(scale, want_scale, rtol=2e-6, atol=0)
        slack = 2e-6 * got.abs()
    else:
        assert _among(scales, [t[1] for t in tries]).all()
        slack = torch.zeros_like(got)
    if spec.rounding == "official":
        assert equal > 0.98
        torch.testing.assert_close(got, ideal, rtol=0.15, atol=float(ideal.abs().max()) / 64)
        return
    right = (torch.minimum(low, high) - slack <= got) & (got <= torch.maximum(low, high) + slack)
    assert right.all(), f"{(~right).sum()} of {right.numel()} values differ"
    assert equal > 0.995, f"only {equal:.4f} of the bytes are equal"


def _among(got: torch.Tensor, options: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([got == option for option in options]).any(0)


def settle() -> None:
    """A launch that waits for all before it, as an engine's are before a decode step."""
    torch.zeros(1, device=DEVICE).add_(1)
