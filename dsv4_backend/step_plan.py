"""What one step does: which tokens came, where their state rows lie, and where results go.

Plans are frozen, hold the engines' own tensors, are built once a step and shared by all layers of
one kind; each checks its contract when it is built.

They come in two families. The ring plans are sglang's: the state holds raw scores in a ring of
pages for each request. The paged plans are vLLM's: the state is a paged cache addressed through a
block table, and holds score + APE. In both, a window that ends in a prefill chunk may lie partly
in the state and partly in the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from dsv4_backend import validation

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch, Packed

PlanLayout = Literal["rows", "ring", "ring_v1", "paged"]
Phase = Literal["decode", "prefill"]
Packs = dict[tuple["KernelLaunch", int], "Packed"]
"""A plan's arguments of a kernel and one of its groups (``arguments``), made ready once."""


@dataclass(frozen=True)
class SeqLens:
    """Decode plan of the in-place operator: entry n is row n of kv.

    Attributes:
        seq_lens: [N] int32 or int64, tokens of the sequence with the new one. Where it is not a
            positive multiple of the ratio (-1 is padding) the row is left alone.
    """

    layout: ClassVar[PlanLayout] = "rows"
    phase: ClassVar[Phase] = "decode"

    seq_lens: torch.Tensor

    def __post_init__(self) -> None:
        validation.check_index("seq_lens", self.seq_lens, ("N",))

    @cached_property
    def num_tokens(self) -> int:
        return self.seq_lens.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.seq_lens.device


@dataclass(frozen=True)
class RowPlan:
    """Prefill plan of the in-place operator, sglang's plan v1.

    Attributes:
        rows: [N, 4] int32 {row, batch, position, window_len}, or the same as [N, 16] uint8.
            Entries with row < 0 are skipped, and so is a position that does not end a window.
            No row may occur twice: it would be normed twice.
    """

    layout: ClassVar[PlanLayout] = "rows"
    phase: ClassVar[Phase] = "prefill"

    rows: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _int32_plan("rows", self.rows, 4))

    @cached_property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.rows.device


@dataclass(frozen=True)
class RingDecode:
    """One token a request, sglang's plan v2. State [pages, ratio, row_width].

    Attributes:
        plan: [N, 4] int32 {seq_len, write_loc, read_page_0, read_page_1} or [N, 16] uint8;
            seq_len -1 or write_loc < 0 is padding.
        slots: [N] int32 or int64, cache slot of the compressed token; < 0 stores nothing.
        is_settled: a promise that at least one ordinary launch, one that waits for all before it,
            lies on the stream between the last write of the plan's tensors or of earlier tokens'
            state rows and the call, as an engine's projections do. Kernels may then read those
            while the launch before theirs still runs.
    """

    layout: ClassVar[PlanLayout] = "ring"
    phase: ClassVar[Phase] = "decode"

    plan: torch.Tensor
    slots: torch.Tensor
    is_settled: bool = False
    packs: Packs = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", _int32_plan("plan", self.plan, 4))
        validation.check_index("slots", self.slots, (self.plan.shape[0],), self.plan.device)

    @cached_property
    def num_tokens(self) -> int:
        return self.plan.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.plan.device


@dataclass(frozen=True)
class RingDecodeV1:
    """One token a request, sglang's plan v1. State [pages, window, row_width].

    Attributes:
        seq_lens: [N] int32 or int64; <= 0 is padding.
        pages: [N] int32 or int64, the request's ring; token p lies in row p % window. < 0 is
            padding.
        slots, is_settled: as in ``RingDecode``.
    """

    layout: ClassVar[PlanLayout] = "ring_v1"
    phase: ClassVar[Phase] = "decode"

    seq_lens: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    is_settled: bool = False
    packs: Packs = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validation.check_index("seq_lens", self.seq_lens, ("N",))
        rows, device = self.seq_lens.shape[0], self.seq_lens.device
        validation.check_index("pages", self.pages, (rows,), device)
        validation.check_index("slots", self.slots, (rows,), device)

    @cached_property
    def num_tokens(self) -> int:
        return self.seq_lens.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.seq_lens.device


@dataclass(frozen=True)
class RingPrefill:
    """Chunks of requests, sglang's plan v2. State [pages, ratio, row_width].

    Attributes:
        windows: [N, 4] int32 or [N, 16] uint8, one window each: {seq_len, token | buffer_len << 16,
            read_page_0, read_page_1}; seq_len -1 is padding. The window ends with input row
            ``token``; its first buffer_len rows are in the state.
        writes: [M, 2] int32 or [M, 8] uint8 {token, write_loc}: state rows to write; token or
            write_loc < 0 is padding.
        slots: [T] int32 or int64, indexed by token.
    """

    layout: ClassVar[PlanLayout] = "ring"
    phase: ClassVar[Phase] = "prefill"

    windows: torch.Tensor
    writes: torch.Tensor
    slots: torch.Tensor
    packs: Packs = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", _int32_plan("windows", self.windows, 4))
        object.__setattr__(self, "writes", _int32_plan("writes", self.writes, 2))
        device = self.windows.device
        validation.check_index("writes", self.writes, ("M", 2), device)
        validation.check_index("slots", self.slots, ("T",), device)

    @cached_property
    def num_tokens(self) -> int:
        return self.slots.shape[0]

    @cached_property
    def num_windows(self) -> int:
        return self.windows.shape[0]

    @cached_property
    def num_writes(self) -> int:
        """Entries of the plan that may write a state row."""
        return self.writes.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.windows.device


@dataclass(frozen=True)
class RingPrefillV1:
    """Chunks of requests, sglang's plan v1. State [pages, window, row_width].

    Attributes:
        windows, writes: [N, 4] and [M, 4] int32 (or uint8 [., 16]) {token, batch, position,
            window_len}; token -1 is padding. The first window_len rows of a window are in the
            state.
        pages: [B] int32 or int64, each request's ring.
        slots: [T] int32 or int64, indexed by token.
    """

    layout: ClassVar[PlanLayout] = "ring_v1"
    phase: ClassVar[Phase] = "prefill"

    windows: torch.Tensor
    writes: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor
    packs: Packs = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", _int32_plan("windows", self.windows, 4))
        object.__setattr__(self, "writes", _int32_plan("writes", self.writes, 4))
        device = self.windows.device
        validation.check_index("writes", self.writes, ("M", 4), device)
        validation.check_index("pages", self.pages, ("B",), device)
        validation.check_index("slots", self.slots, ("T",), device)

    @cached_property
    def num_tokens(self) -> int:
        return self.slots.shape[0]

    @cached_property
    def num_windows(self) -> int:
        return self.windows.shape[0]

    @cached_property
    def num_writes(self) -> int:
        """Entries of the plan that may write a state row."""
        return self.writes.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.windows.device


@dataclass(frozen=True)
class PagedDecode:
    """One token a request, vLLM's metadata. State [blocks, block, row_width] with score + APE.

    Attributes:
        positions: [N] int32 or int64, position of the new token.
        state_slots: [N] int32 or int64, state row to write; < 0 is padding.
        requests: [N] int32 or int64, row of the block table.
        block_table: [B, blocks] int32, state blocks of a request by position // block.
        slots: [N] int32 or int64, cache slot of the compressed token; < 0 stores nothing.
        is_settled: as in ``RingDecode``.
    """

    layout: ClassVar[PlanLayout] = "paged"
    phase: ClassVar[Phase] = "decode"

    positions: torch.Tensor
    state_slots: torch.Tensor
    requests: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    is_settled: bool = False
    packs: Packs = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validation.check_paged(self)

    @cached_property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.positions.device


@dataclass(frozen=True)
class PagedPrefill:
    """Chunks of requests, vLLM's metadata; the fields of ``PagedDecode`` for T tokens, and:

    Attributes:
        query_starts: [B + 1] int32 or int64, first token of each request in this call.
        ends: [N] int32 or int64, the tokens that end a window, -1 in unused places: see
            ``window_ends``.
    """

    layout: ClassVar[PlanLayout] = "paged"
    phase: ClassVar[Phase] = "prefill"

    positions: torch.Tensor
    state_slots: torch.Tensor
    requests: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    ends: torch.Tensor
    packs: Packs = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validation.check_paged(self)
        device = self.positions.device
        validation.check_index("query_starts", self.query_starts, ("B + 1",), device)
        validation.check_index("ends", self.ends, ("N",), device)

    @cached_property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @cached_property
    def num_windows(self) -> int:
        return self.ends.shape[0]

    @cached_property
    def num_writes(self) -> int:
        """Entries of the plan that may write a state row."""
        return self.num_tokens

    @cached_property
    def device(self) -> torch.device:
        return self.positions.device


def window_ends(
    positions: torch.Tensor, state_slots: torch.Tensor, num_requests: int, compress_ratio: int
) -> torch.Tensor:
    """The tokens whose position ends a window, in order, without asking the device how many.

    Args:
        positions, state_slots: [T] as in ``PagedPrefill``; a state slot < 0 is padding.
        num_requests: requests in this call.
        compress_ratio: 4 or 128.

    Returns:
        [T // compress_ratio + num_requests] int32, -1 after the last: each request has at most one
        end more than its tokens have full ratios.
    """
    tokens = positions.shape[0]
    size = min(tokens, tokens // compress_ratio + num_requests)
    is_end = ((positions + 1) % compress_ratio == 0) & (positions >= 0) & (state_slots >= 0)
    # Ends go to their rank; everything else to a place past the last, which is cut off.
    rank = torch.where(is_end, is_end.cumsum(0) - 1, size).clamp_(max=size)
    ends = torch.full((size + 1,), -1, dtype=torch.int32, device=positions.device)
    token = torch.arange(tokens, dtype=torch.int32, device=positions.device)
    return ends.scatter_(0, rank, token)[:size]


def _int32_plan(name: str, plan: torch.Tensor, columns: int) -> torch.Tensor:
    """A plan as [N, columns] int32, viewing the bytes that sglang hands out."""
    if plan.dtype is torch.uint8:
        validation.check_plan_bytes(name, plan, 4 * columns)
        plan = plan.view(torch.int32)
    validation.check_index(name, plan, ("N", columns))
    return plan


DecodePlan = RingDecode | RingDecodeV1 | PagedDecode
PrefillPlan = RingPrefill | RingPrefillV1 | PagedPrefill
