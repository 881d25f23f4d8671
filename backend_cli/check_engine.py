"""A compressor's engine in miniature: a poisoned state and cache, and the plans of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

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
from dsv4_backend.spec import CacheFormat
from dsv4_backend.step_plan import DecodePlan, PrefillPlan

Layout = Literal["paged", "ring", "ring_v1"]

PAGE_TOKENS = 4
_POISON = 0xA5


@dataclass
class Engine:
    """A compressor with the state and cache of requests, all on the CPU.

    Attributes:
        lengths: tokens of each request at the end.
        history: the projections of each request, ``[length, row_width]`` fp32.
    """

    layer: CompressorLayer
    layout: Layout
    lengths: tuple[int, ...]
    history: list[torch.Tensor]
    state: torch.Tensor
    cache: torch.Tensor

    @property
    def spec(self) -> CompressorSpec:
        return self.layer.spec

    @property
    def block(self) -> int:
        return self.state.shape[1]

    def location(self, request: int, position: int) -> int:
        """The state row of a token, counted over all pages."""
        if self.layout == "paged":
            return int(self.block_table()[request, position // self.block]) * self.block + (
                position % self.block
            )
        return request * self.spec.window + position % self.spec.window

    def block_table(self) -> torch.Tensor:
        """[requests, blocks] int32; the blocks of one request are not neighbours."""
        requests, blocks = len(self.lengths), max(self.lengths) // self.block + 1
        return torch.arange(requests * blocks, dtype=torch.int32).view(blocks, requests).T

    def slot(self, request: int, position: int) -> int:
        """The cache slot of the window that ends at a position, -1 where none does."""
        window, rest = divmod(position + 1, self.spec.compress_ratio)
        if rest:
            return -1
        return (window - 1) * len(self.lengths) + len(self.lengths) - 1 - request

    def decode_plan(self, positions: list[int | None]) -> DecodePlan:
        """The newest token of each request, and a padded entry for ``None``."""
        r, rows = self.spec.compress_ratio, []
        for request, position in enumerate(positions):
            if position is None:
                rows.append([-1, -1, 0, 0])
                continue
            pages = [
                self.location(request, max(p, 0)) // self.block for p in (position - r, position)
            ]
            rows.append([position + 1, self.location(request, position), *pages])
        slots = [-1 if p is None else self.slot(n, p) for n, p in enumerate(positions)]
        if self.layout == "ring":
            return RingDecode(int32(rows), int64(slots))
        if self.layout == "ring_v1":
            pages_of = [-1 if p is None else n for n, p in enumerate(positions)]
            return RingDecodeV1(int32([row[0] for row in rows]), int32(pages_of), int64(slots))
        return PagedDecode(
            positions=int64([row[0] - 1 if row[0] > 0 else 7 for row in rows]),
            state_slots=int64([row[1] for row in rows]),
            requests=int32(list(range(len(rows)))),
            block_table=self.block_table().contiguous(),
            slots=int64(slots),
        )

    def prefill_plan(self, chunks: list[tuple[int, int]]) -> PrefillPlan:
        """Tokens [start, end) of every request, one request behind the other."""
        spec, r = self.spec, self.spec.compress_ratio
        tokens = [(n, p) for n, (start, end) in enumerate(chunks) for p in range(start, end)]
        slots = int64([self.slot(*token) for token in tokens])
        windows, windows_v1, writes, writes_v1 = [], [], [], []
        for token, (request, position) in enumerate(tokens):
            start, end = chunks[request]
            old = max(spec.window - (position - start + 1), 0)
            if self.slot(request, position) >= 0:
                pages = [
                    self.location(request, max(p, 0)) // self.block
                    for p in (position - r, position)
                ]
                windows.append([position + 1, token | old << 16, *pages])
                windows_v1.append([token, request, position, old])
            if position >= end - spec.window:  # what later windows read
                writes.append([token, self.location(request, position)])
                writes_v1.append([token, request, position, 0])
        if self.layout == "ring":
            padded = [[-1, -1, -1, -1], *windows], [*writes, [-1, -1]]
            return RingPrefill(int32(padded[0]), int32(padded[1]), slots)
        if self.layout == "ring_v1":
            pad = [-1, -1, -1, -1]
            pages_of = int32(list(range(len(chunks))))
            return RingPrefillV1(
                int32([pad, *windows_v1]), int32([*writes_v1, pad]), pages_of, slots
            )
        positions = int64([p for _, p in tokens])
        state_slots = int64([self.location(*token) for token in tokens])
        starts = [sum(end - start for start, end in chunks[:n]) for n in range(len(chunks) + 1)]
        return PagedPrefill(
            positions=positions,
            state_slots=state_slots,
            requests=int32([n for n, _ in tokens]),
            block_table=self.block_table().contiguous(),
            slots=slots,
            query_starts=int32(starts),
            ends=window_ends(positions, state_slots, len(chunks), r),
        )

    def rows(self, chunks: list[tuple[int, int]]) -> torch.Tensor:
        """The projections of those tokens."""
        return torch.cat([self.history[n][a:b] for n, (a, b) in enumerate(chunks)])


def make_engine(
    kind: str,
    layout: Layout,
    hard: bool,
    seed: int = 5,
    lengths: tuple[int, ...] | None = None,
) -> Engine:
    """A poisoned engine: unwritten state rows are NaN, unwritten cache bytes 0xA5.

    ``paged`` follows vLLM's rounding, formats and RoPE table, the rings sglang's. Hard rows hold
    magnitudes from 1e-20 to 1e4, scores that differ by hundreds, and a row of zeros.
    """
    is_indexer, ratio = kind == "indexer", 128 if kind == "main_c128" else 4
    fp4: CacheFormat = "indexer_mxfp4" if hard else "indexer_fp8"
    vllm = layout == "paged"
    spec = CompressorSpec(
        head_dim=128 if is_indexer else 512,
        compress_ratio=ratio,
        cache_format=fp4 if is_indexer else "fp8_ds_mla",
        page_tokens=PAGE_TOKENS,
        rounding="vllm" if vllm else "sglang",
        rotate=is_indexer and not vllm,
        fp8="ocp",
        rope_layout="split" if vllm else "interleaved",
    )
    lengths = lengths or ((130, 257, 128) if ratio == 128 else (6, 21, 4))
    rng = torch.Generator().manual_seed(seed)
    ape = torch.randn(ratio, spec.halves, spec.head_dim, generator=rng)
    weight = 0.5 + torch.rand(spec.head_dim, generator=rng)
    angle = 6.3 * torch.rand(max(1024, max(lengths)), 32, generator=rng)
    split = torch.cat((angle.cos(), angle.sin()), 1)
    table = split if vllm else torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
    history, half = [], spec.row_width // 2
    for length in lengths:
        row = torch.randn(length, spec.row_width, generator=rng)
        if hard:
            row[:, :half] *= 10.0 ** (24 * torch.rand(length, 1, generator=rng) - 20)
            row[:, half:] *= 100.0
            row[length // 2, :half] = 0.0
        history.append(reference.round_bf16(row))
    block = {"paged": 4 if ratio == 4 else 8, "ring": ratio, "ring_v1": spec.window}[layout]
    kept = max(lengths) // block + 1 if vllm else spec.window // block
    # One row more than a page holds: pages are not contiguous.
    full = torch.full((len(lengths) * kept, block + 1, spec.row_width), torch.nan)
    windows = len(lengths) * (max(lengths) // ratio)
    stride = -(-spec.page_bytes // 64) * 64 + 64
    cache = torch.full((windows // PAGE_TOKENS + 1, stride), _POISON, dtype=torch.uint8)
    layer = CompressorLayer(spec, ape, weight, table)
    return Engine(layer, layout, lengths, history, full[:, :block], cache)


def int32(values: list[list[int]] | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
