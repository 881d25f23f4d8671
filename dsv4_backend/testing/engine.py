"""An engine in miniature: a state and a cache with poisoned pages, and its step plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from backend_core.formats import RECORD_FORMATS
from dsv4_backend import (
    CompressorLayer,
    CompressorSpec,
    PagedDecode,
    PagedPrefill,
    RingDecode,
    RingPrefill,
    reference,
    window_ends,
)
from dsv4_backend.compressor.bound import CompressorCall
from dsv4_backend.spec import RopeLayout
from dsv4_backend.step_plan import DecodeStepPlan, PrefillStepPlan, StateLayout

POISON = 0xA5
MAX_POSITIONS = 1024

Chunk = tuple[int, int, int]
"""A request's tokens [start, end) in one call: (request, start, end)."""


def default_device() -> torch.device:
    """Where kernels run: the GPU, or the CPU under Triton's interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def make_spec(cache_format: str = "fp8_ds_mla", ratio: int = 4, **changes: Any) -> CompressorSpec:
    """A spec with vLLM's rounding, e4m3 of OCP and pages of 4 tokens, or of as many as the format
    has; the indexer rotates."""
    is_indexer = cache_format.startswith("indexer")
    fields: dict[str, Any] = {
        "page_tokens": max(4, RECORD_FORMATS[cache_format].tile_tokens),  # type: ignore[index]
        "rounding": "vllm",
        "rotate": is_indexer,
        "fp8": "ocp",
        "rope_layout": "interleaved",
    }
    return CompressorSpec(
        head_dim=128 if is_indexer else 512,
        compress_ratio=ratio,
        cache_format=cache_format,  # type: ignore[arg-type]
        **fields | changes,
    )


def rope_table(
    layout: RopeLayout = "interleaved",
    generator: torch.Generator | None = None,
    positions: int = MAX_POSITIONS,
    device: torch.device | None = None,
) -> torch.Tensor:
    """[positions, 64] of random angles: every position has a rotation of its own."""
    angle = 6.3 * torch.rand(positions, 32, generator=generator)
    if layout == "split":
        table = torch.cat((angle.cos(), angle.sin()), 1)
    else:
        table = torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
    return table.to(device or default_device())


def make_layer(
    spec: CompressorSpec, seed: int = 0, device: torch.device | None = None
) -> CompressorLayer:
    """Random weights: APE standard normal, the norm's weights in [0.5, 1.5)."""
    device = device or default_device()
    g = torch.Generator().manual_seed(seed)
    ape = torch.randn(spec.compress_ratio, spec.halves, spec.head_dim, generator=g)
    weight = 0.5 + torch.rand(spec.head_dim, generator=g)
    table = rope_table(spec.rope_layout, g, device=device)
    return CompressorLayer(spec, ape.to(device), weight.to(device), table)


def make_history(
    spec: CompressorSpec,
    length: int,
    seed: int,
    *,
    adversarial: bool = False,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The projections of one sequence, [length, row_width] fp32, in bf16 precision.

    Adversarial rows have magnitudes from 1e-20 to 1e4, scores that differ by hundreds, and a row of
    zeros.
    """
    g = torch.Generator().manual_seed(seed)
    x, half = torch.randn(length, spec.row_width, generator=g), spec.row_width // 2
    if adversarial:
        x[:, :half] *= 10.0 ** (24 * torch.rand(length, 1, generator=g) - 20)
        x[:, half:] *= 100.0
        x[length // 2, :half] = 0.0
    else:
        x[:, :half] *= torch.rand(length, 1, generator=g) * 8
    return reference.round_bf16(x).to(device or default_device())


@dataclass
class Engine:
    """State, cache and addressing of one compressor for a few requests.

    State rows start as NaN and cache bytes as ``POISON``: whatever reads or writes too much shows.

    Attributes:
        lengths: tokens of each request at the end.
        state: [pages, state_block, row_width]; pages are not contiguous.
        cache: [pages, page bytes] uint8; pages are further apart than their bytes.
        second_cache: the same of record formats that have two tensors, or ``None``.
        slot_of: [requests, windows], cache slots in no order.
    """

    layout: StateLayout
    spec: CompressorSpec
    lengths: list[int]
    state_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=default_device)
    state_block: int = field(init=False)
    state: torch.Tensor = field(init=False)
    cache: torch.Tensor = field(init=False)
    second_cache: torch.Tensor | None = field(init=False, default=None)
    slot_of: torch.Tensor = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        spec, requests = self.spec, len(self.lengths)
        g = torch.Generator().manual_seed(3)
        windows = max(self.lengths) // spec.compress_ratio + 1
        pages = (requests * windows + spec.page_tokens - 1) // spec.page_tokens + 1
        self.slot_of = torch.randperm(pages * spec.page_tokens, generator=g)[: requests * windows]
        self.slot_of = self.slot_of.view(requests, windows)
        self.cache = self._poisoned(pages, spec.page_bytes)
        if spec.second_page_bytes:
            self.second_cache = self._poisoned(pages, spec.second_page_bytes)
        if self.layout == "paged":
            self.state_block = 4 if spec.compress_ratio == 4 else 8
            blocks = max(self.lengths) // self.state_block + 1
            self.table = torch.randperm(requests * blocks, generator=g).view(requests, blocks)
            state_pages = requests * blocks
        else:
            self.state_block = spec.compress_ratio
            state_pages = requests * spec.halves
        # One row more than a page holds: pages are not contiguous.
        shape = (state_pages, self.state_block + 1, spec.row_width)
        full = torch.full(shape, torch.nan, dtype=self.state_dtype, device=self.device)
        self.state = full[:, : self.state_block]

    def _poisoned(self, pages: int, page_bytes: int) -> torch.Tensor:
        stride = (page_bytes + 63) // 64 * 64 + 64
        return torch.full((pages, stride), POISON, dtype=torch.uint8, device=self.device)

    @property
    def caches(self) -> tuple[torch.Tensor, ...]:
        """The tensors that records lie in."""
        second = self.second_cache
        return (self.cache,) if second is None else (self.cache, second)

    def call(self, layer: CompressorLayer, kv_score: torch.Tensor) -> CompressorCall:
        """A call of the operators on this engine's memory."""
        return CompressorCall(layer, kv_score, self.state, self.cache, self.second_cache)

    def locate(self, request: int, position: int) -> tuple[int, int]:
        """(page, row) of a token in the state."""
        if self.layout == "paged":
            block = self.table[request, position // self.state_block]
            return int(block), position % self.state_block
        ring = position % self.spec.window
        page = request * self.spec.halves + ring // self.state_block
        return page, ring % self.state_block

    def location(self, request: int, position: int) -> int:
        """The state row of a token, counted over all pages."""
        page, row = self.locate(request, position)
        return page * self.state_block + row

    def slot(self, request: int, seq_len: int) -> int:
        """The cache slot of the window that ends with token ``seq_len - 1``."""
        return int(self.slot_of[request, seq_len // self.spec.compress_ratio - 1])

    def expected_row(
        self, layer: CompressorLayer, row: torch.Tensor, position: int
    ) -> torch.Tensor:
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
        self, entries: list[tuple[int, int] | None], pdl_prefetch_safe: bool = False
    ) -> DecodeStepPlan:
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
            as_bytes = self._int32(rows).view(torch.uint8)  # what sglang hands out
            return RingDecode(as_bytes, self._int64(slots), pdl_prefetch_safe)
        return PagedDecode(
            positions=self._int64([entry[1] - 1 if entry else 7 for entry in entries]),
            state_slots=self._int64([self.location(e[0], e[1] - 1) if e else -1 for e in entries]),
            requests=self._int32([entry[0] if entry else 0 for entry in entries]),
            block_table=self.table.int().to(self.device),
            slots=self._int64(slots),
            pdl_prefetch_safe=pdl_prefetch_safe,
        )

    def prefill_plan(self, chunks: list[Chunk], padding: int = 2) -> PrefillStepPlan:
        """The step plan of chunks that lie one after another in the input, with padded entries."""
        spec, r = self.spec, self.spec.compress_ratio
        tokens = [(request, p) for request, start, end in chunks for p in range(start, end)]
        slots = [self.slot(n, p + 1) if (p + 1) % r == 0 else 0 for n, p in tokens]
        if self.layout == "ring":
            return self._ring_prefill(chunks, slots, padding)
        # vLLM's rows of a step are its requests in this call, not the requests of this engine.
        rows = {request: row for row, (request, _, _) in enumerate(chunks)}
        positions = self._int64([position for _, position in tokens])
        state_slots = self._int64([self.location(*token) for token in tokens])
        starts = [0]
        for _, start, end in chunks:
            starts.append(starts[-1] + end - start)
        return PagedPrefill(
            positions=positions,
            state_slots=state_slots,
            requests=self._int32([rows[request] for request, _ in tokens]),
            block_table=self.table[[request for request, _, _ in chunks]].int().to(self.device),
            slots=self._int64(slots),
            query_starts=self._int32(starts),
            ends=window_ends(positions, state_slots, len(chunks), spec.compress_ratio),
        )

    def _ring_prefill(self, chunks: list[Chunk], slots: list[int], padding: int) -> RingPrefill:
        spec, r = self.spec, self.spec.compress_ratio
        windows, writes, token = [], [], 0
        for request, start, end in chunks:
            for position in range(start, end):
                if (position + 1) % r == 0:
                    page_0, _ = self.locate(request, max(position - r, 0))
                    page_1, _ = self.locate(request, position)
                    old = max(spec.window - (position - start + 1), 0)
                    windows.append([position + 1, token | old << 16, page_0, page_1])
                if position >= end // r * r - (r if spec.halves == 2 else 0):
                    writes.append([token, self.location(request, position)])
                token += 1
        windows += [[-1, -1, -1, -1]] * padding
        writes += [[-1, -1]] * padding
        return RingPrefill(
            self._int32(windows).view(-1, 4), self._int32(writes).view(-1, 2), self._int64(slots)
        )

    def _int32(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _int64(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
