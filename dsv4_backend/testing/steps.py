"""Steps of an engine's size, on tensors as vLLM lays them out: what ``tune`` and benchmarks time.

fp32 projections, a paged fp32 state, a block table, paged caches (main fp8_ds_mla, indexer fp8).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend_core.operator import Selection, forced
from backend_core.tables.schema import Row
from backend_core.target import Target
from dsv4_backend import (
    CompressorLayer,
    PagedDecode,
    PagedPrefill,
    V41Step,
    compress_decode_,
    compress_prefill_,
    compress_v41_,
    window_ends,
)
from dsv4_backend.launch_params import TABLES
from dsv4_backend.step_plan import DecodeStepPlan, PrefillStepPlan
from dsv4_backend.testing import v41
from dsv4_backend.testing.engine import default_device, make_spec
from dsv4_backend.testing.engine import rope_table as random_rope_table
from dsv4_backend.v41_step import OPERATOR, RING_ROWS, V41Call

PAGE_TOKENS = 64
POSITIONS = 65536 + 8192  # of the rotations' table: the longest case


@dataclass(eq=False)
class TimedStep:
    """A compressor with the tensors of one call; ``ends`` tokens of it end a window."""

    layer: CompressorLayer
    kv_score: torch.Tensor
    state: torch.Tensor
    cache: torch.Tensor
    step_plan: DecodeStepPlan | PrefillStepPlan
    ends: int

    def call(
        self, target: Target | None = None, selection: Selection[Any, Any] | None = None
    ) -> Callable[[], None]:
        """The operator on these tensors, as an adapter calls it."""
        tensors = (self.layer, self.kv_score, self.state, self.cache)
        plan = self.step_plan
        if isinstance(plan, DecodeStepPlan):
            return lambda: compress_decode_(*tensors, plan, target=target, selection=selection)
        return lambda: compress_prefill_(*tensors, plan, target=target, selection=selection)


@functools.cache
def rope_table(device: torch.device) -> torch.Tensor:
    """[positions, 64], cosines first, shared by all layers."""
    return random_rope_table("split", positions=POSITIONS, device=device)


def make_step(
    kind: str,
    positions: torch.Tensor,
    requests: torch.Tensor,
    *,
    pdl_prefetch_safe: bool = True,
) -> TimedStep:
    """A step for tokens at ``positions [T]`` of ``requests [T]``, which are in order.

    Args:
        kind: indexer, main_c4 or main_c128. More tokens than requests make it a prefill.
        pdl_prefetch_safe: of a decode step plan; true as in an engine, whose projections lie
            between.
    """
    device, ratio = positions.device, 128 if kind == "main_c128" else 4
    cache_format = "indexer_fp8" if kind == "indexer" else "fp8_ds_mla"
    spec = make_spec(
        cache_format, ratio, page_tokens=PAGE_TOKENS, rotate=False, rope_layout="split"
    )
    generator = torch.Generator(device).manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    tokens, count = positions.shape[0], int(requests.max()) + 1
    block, is_prefill = 4 if ratio == 4 else 8, tokens > count
    last = int(positions.max()) // block + 1
    # Decoding requests keep a window; a prefilled one keeps all, as vLLM does within a step.
    kept = last if is_prefill else spec.window // block + 1
    own = torch.arange(last, device=device) % kept
    table = (own[None] + kept * torch.arange(count, device=device)[:, None]).int()
    state = normal(count * kept, block, spec.row_width)
    state_slots = table[requests, positions // block].long() * block + positions % block
    is_end = (positions + 1) % ratio == 0
    slots = torch.where(is_end, is_end.cumsum(0) - 1, -1)
    page_bytes = -(-spec.page_bytes // 576) * 576
    cache = torch.zeros(tokens // PAGE_TOKENS + 1, page_bytes, dtype=torch.uint8, device=device)
    layer = CompressorLayer(
        spec,
        ape=normal(ratio, spec.halves, spec.head_dim),
        norm_weight=1 + 0.1 * normal(spec.head_dim),
        rope_table=rope_table(device),
    )
    common = (positions, state_slots, requests.int(), table, slots)
    plan: PagedDecode | PagedPrefill = PagedDecode(*common, pdl_prefetch_safe)
    if is_prefill:
        starts = torch.searchsorted(requests, torch.arange(count + 1, device=device)).int()
        plan = PagedPrefill(*common, starts, window_ends(positions, state_slots, count, ratio))
    return TimedStep(layer, normal(tokens, spec.row_width), state, cache, plan, int(is_end.sum()))


@dataclass(eq=False)
class TimedV41:
    """A compressor of ratio 1 or 2 with the tensors of one call; ``ends`` groups of it end."""

    call: V41Call
    step_plan: V41Step
    ends: int

    def run(
        self, target: Target | None = None, selection: Selection[Any, Any] | None = None
    ) -> Callable[[], None]:
        """The operator on these tensors, as an adapter calls it."""
        call, plan = self.call, self.step_plan
        tensors = (call.layer, call.kv_score, call.state, call.cache, call.index_cache)
        chosen: dict[str, Any] = {"target": target, "selection": selection}
        return lambda: compress_v41_(*tensors, plan, score=call.score, **chosen)


def make_v41(
    ratio: int,
    positions: torch.Tensor,
    requests: torch.Tensor,
    main: str,
    index: str,
    rounding: str = "vllm",
) -> TimedV41:
    """A step of V4.1 for tokens at ``positions [T]`` of ``requests [T]``, which are in order, on
    tensors as the engine whose rounding it is lays them out on Hopper. sglang stores nothing in
    slot 0, and its rings are followed by rows of nobody.

    Args:
        main, index: the record formats.
    """
    device, tokens, count = positions.device, positions.shape[0], int(requests.max()) + 1
    spec = v41.make_spec(ratio, main, index, PAGE_TOKENS, rounding)
    is_sglang = rounding == "sglang_v41"
    generator = torch.Generator(device).manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    is_end = (positions + 1) % ratio == 0
    slots = torch.where(is_end, is_end.cumsum(0) - (0 if is_sglang else 1), -1)
    pages = (tokens + is_sglang) // PAGE_TOKENS + 1
    page_bytes = [-(-records.page_bytes // 576) * 576 for records in (spec.main, spec.index)]
    if is_sglang:
        page_bytes[1] = spec.index.page_bytes
    cache, index_cache = (
        torch.zeros(pages, size, dtype=torch.uint8, device=device) for size in page_bytes
    )
    state, score, given = None, None, {}
    kv_score, longest = normal(tokens, spec.row_width), int(torch.bincount(requests).max())
    if ratio == 2 and is_sglang:
        ring_rows = 2 if longest != 3 else 4  # of three verified tokens
        state = normal(count + 1, ring_rows, spec.row_width)[:count]
        kv_score, score = (half.contiguous() for half in kv_score.chunk(2, 1))
        given = {"state_slots": torch.ones_like(slots), "requests": requests}
        if longest > ring_rows:
            starts = torch.searchsorted(requests, torch.arange(count, device=device))
            given["query_starts"] = starts.int()
    elif ratio == 2:
        state = normal(count + 1, RING_ROWS, spec.row_width)
        starts = torch.searchsorted(requests, torch.arange(count + 1, device=device))
        state_slots = (requests + 1) * RING_ROWS + positions % RING_ROWS
        given = {"state_slots": state_slots, "query_starts": starts.int()}
    layer = v41.make_layer(spec, device=device, positions=POSITIONS)
    if is_sglang and ratio == 1:
        kv_score = kv_score.bfloat16()
    call = V41Call(layer, kv_score, state, cache, index_cache, score)
    plan = V41Step(positions, slots, slots.clone(), **given, longest=longest)
    return TimedV41(call, plan, int(is_end.sum()))


def measure(row: Row, target: Target, grid: int) -> Callable[[], None]:
    """The call that ``tune`` times: ``grid`` requests that decode, each at the end of a window, or
    one prompt of ``grid`` windows; of a compressor of V4.1 a prompt of ``grid`` tokens."""
    selection = forced(TABLES, target, None, row)
    if row.operator == OPERATOR:
        positions = torch.arange(grid, device=default_device())
        requests = torch.zeros_like(positions)
        if row.max_longest:
            positions, requests = torch.full_like(positions, 4095), positions
        step = make_v41(2, positions, requests, "fp8_ds_mla", "indexer_fp8")
        return step.run(target, selection)
    kind, _, phase = row.operator.rpartition("_")
    ratio, device = 128 if kind == "main_c128" else 4, default_device()
    positions = torch.full((grid,), 2 * ratio - 1, device=device)
    requests = torch.arange(grid, device=device)
    if phase == "prefill":
        positions = torch.arange(grid * ratio, device=device)
        requests = torch.zeros_like(positions)
    return make_step(kind, positions, requests).call(target, selection)
