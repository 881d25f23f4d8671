"""What one step has to do: which tokens came, where their state rows lie, where results go.

Step plans are frozen, hold the engines' own tensors, are built once per step and shared by all
layers of one kind; each checks its contract when it is built.

Those of a compressor's whole step come for two layouts of the state. In sglang's ``ring`` the state
holds raw scores in a ring of pages per request. In vLLM's ``paged`` layout the state is a paged
cache addressed through a block table, and holds score + APE. In both, a window that ends in a
prefill chunk may lie partly in the state and partly in the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from dsv4_backend.contract.values import check_index, int32_entries

if TYPE_CHECKING:
    from backend_core.launch.triton import Argument, Packed
    from dsv4_backend.spec import CompressorSpec

StateLayout = Literal["ring", "paged"]


class WindowEnd(NamedTuple):
    """A token that ends a window, as the host reads it from a step plan.

    Attributes:
        token: input row of the window's last token.
        seq_len: tokens of the sequence up to and with it.
        rows_in_state: rows of the window, from its first, that lie in the state.
        pages: of the previous and the own window (ring), or the request's row of the block table.
        slot: cache slot of the result; < 0 stores nothing.
    """

    token: int
    seq_len: int
    rows_in_state: int
    pages: list[int]
    slot: int


class StateWrite(NamedTuple):
    """A state row that a step writes; ``row`` counts rows over all pages.

    ``position`` is the token's in its sequence, which the paged layout alone needs (-1 elsewhere).
    """

    token: int
    position: int
    row: int


@dataclass(frozen=True)
class SeqLens:
    """Step plan of the in-place operator: entry n is row n of kv.

    Attributes:
        seq_lens: [N] int32 or int64, tokens of the sequence with the new one. Where it is not a
            positive multiple of the ratio (-1 is padding) the row is left alone.
    """

    seq_lens: torch.Tensor

    def __post_init__(self) -> None:
        check_index("seq_lens", self.seq_lens, ("N",))

    @cached_property
    def num_tokens(self) -> int:
        return self.seq_lens.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.seq_lens.device


class CompressorStepPlan:
    """What the step plans of a compressor have in common."""

    state_layout: ClassVar[StateLayout]
    pdl_prefetch_safe: bool = False

    slots: torch.Tensor

    @cached_property
    def num_tokens(self) -> int:
        """Input rows that a call must have."""
        return self.slots.shape[0]

    @cached_property
    def device(self) -> torch.device:
        return self.slots.device

    def kernel_arguments(self) -> dict[str, Argument]:
        """The kernels' arguments by name, the same names for every plan of a class."""
        raise NotImplementedError

    @cached_property
    def packed(self) -> Packed:
        """``kernel_arguments``, prepared once for all launches of the step."""
        from backend_core.launch.triton import KernelLaunch  # the torch path needs no triton

        return KernelLaunch.pack(self.kernel_arguments().values())

    def window_ends(self, spec: CompressorSpec) -> Iterator[WindowEnd]:
        """Entries that are not padding, read on the host; not all of them end a window."""
        raise NotImplementedError

    def state_writes(self) -> Iterator[StateWrite]:
        """State rows that the step writes, read on the host."""
        raise NotImplementedError


class DecodeStepPlan(CompressorStepPlan):
    """A step with one token per request."""


class PrefillStepPlan(CompressorStepPlan):
    """A step with chunks of requests."""

    @cached_property
    def num_windows(self) -> int:
        """Entries of the plan that may end a window."""
        raise NotImplementedError

    @cached_property
    def num_writes(self) -> int:
        """Entries of the plan that may write a state row."""
        return self.num_tokens


@dataclass(frozen=True, eq=False)
class RingDecode(DecodeStepPlan):
    """One token per request, sglang's plan v2. State [pages, ratio, row_width].

    Attributes:
        entries: [N, 4] int32 {seq_len, write_loc, read_page_0, read_page_1} or [N, 16] uint8;
            seq_len -1 or write_loc < 0 is padding.
        slots: [N] int32 or int64, cache slot of the compressed token; < 0 stores nothing.
        pdl_prefetch_safe: a promise that the stream has at least one ordinary launch, which waits
            for all before it, between the last write of the plan's tensors or of earlier tokens'
            state rows and the call. An engine's projections are such launches. Kernels may then
            read these tensors while the previous kernel still runs.
    """

    state_layout: ClassVar[StateLayout] = "ring"

    entries: torch.Tensor
    slots: torch.Tensor
    pdl_prefetch_safe: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", int32_entries("entries", self.entries, 4))
        check_index("slots", self.slots, (self.entries.shape[0],), self.entries.device)

    def kernel_arguments(self) -> dict[str, Argument]:
        return {"entry_ptr": self.entries, "slot_ptr": self.slots}

    def window_ends(self, spec: CompressorSpec) -> Iterator[WindowEnd]:
        slots = self.slots.tolist()
        for token, (seq_len, write, page_0, page_1) in enumerate(self.entries.tolist()):
            if write >= 0:
                yield WindowEnd(token, seq_len, spec.window - 1, [page_0, page_1], slots[token])

    def state_writes(self) -> Iterator[StateWrite]:
        for token, (seq_len, row, _, _) in enumerate(self.entries.tolist()):
            if seq_len > 0 and row >= 0:
                yield StateWrite(token, -1, row)


@dataclass(frozen=True, eq=False)
class RingPrefill(PrefillStepPlan):
    """Chunks of requests, sglang's plan v2. State [pages, ratio, row_width].

    Attributes:
        windows: [N, 4] int32 or [N, 16] uint8, one window each: {seq_len, token | buffer_len << 16,
            read_page_0, read_page_1}; seq_len -1 is padding. The window ends with input row
            ``token``; its first buffer_len rows are in the state.
        writes: [M, 2] int32 or [M, 8] uint8 {token, write_loc}: state rows to write; token or
            write_loc < 0 is padding.
        slots: [T] int32 or int64, indexed by token.
    """

    state_layout: ClassVar[StateLayout] = "ring"

    windows: torch.Tensor
    writes: torch.Tensor
    slots: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", int32_entries("windows", self.windows, 4))
        object.__setattr__(self, "writes", int32_entries("writes", self.writes, 2))
        expect_device("writes", self.writes, self.windows.device)
        check_index("slots", self.slots, ("T",), self.windows.device)

    def kernel_arguments(self) -> dict[str, Argument]:
        return {
            "entry_ptr": self.windows,
            "write_ptr": self.writes,
            "slot_ptr": self.slots,
            "num_windows": self.num_windows,
        }

    @cached_property
    def num_windows(self) -> int:
        return self.windows.shape[0]

    @cached_property
    def num_writes(self) -> int:
        return self.writes.shape[0]

    def window_ends(self, spec: CompressorSpec) -> Iterator[WindowEnd]:
        slots = self.slots.tolist()
        for seq_len, packed, page_0, page_1 in self.windows.tolist():
            token, buffer_len = packed & 0xFFFF, (packed >> 16) & 0xFFFF
            if seq_len > 0:
                yield WindowEnd(token, seq_len, buffer_len, [page_0, page_1], slots[token])

    def state_writes(self) -> Iterator[StateWrite]:
        for token, row in self.writes.tolist():
            if token >= 0 and row >= 0:
                yield StateWrite(token, -1, row)


@dataclass(frozen=True, eq=False)
class PagedDecode(DecodeStepPlan):
    """One token per request, vLLM's metadata. State [blocks, block, row_width] with score + APE.

    Attributes:
        positions: [N] int32 or int64, position of the new token; not negative, of padding neither.
        state_slots: [N] int32 or int64, state row to write; < 0 is padding.
        requests: [N] int32 or int64, row of the block table.
        block_table: [B, blocks] int32, state blocks of a request by position // block.
        slots: [N] int32 or int64, cache slot of the compressed token; < 0 stores nothing.
        pdl_prefetch_safe: as in ``RingDecode``.
    """

    state_layout: ClassVar[StateLayout] = "paged"

    positions: torch.Tensor
    state_slots: torch.Tensor
    requests: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    pdl_prefetch_safe: bool = False

    def __post_init__(self) -> None:
        _check_paged(self)

    def kernel_arguments(self) -> dict[str, Argument]:
        return _paged_arguments(self)

    def window_ends(self, spec: CompressorSpec) -> Iterator[WindowEnd]:
        positions, table = self.positions.tolist(), self.block_table.tolist()
        requests, slots = self.requests.tolist(), self.slots.tolist()
        for token, row in enumerate(self.state_slots.tolist()):
            if row >= 0:
                pages, seq_len = table[requests[token]], positions[token] + 1
                yield WindowEnd(token, seq_len, spec.window - 1, pages, slots[token])

    def state_writes(self) -> Iterator[StateWrite]:
        return _paged_writes(self)


@dataclass(frozen=True, eq=False)
class PagedPrefill(PrefillStepPlan):
    """Chunks of requests, vLLM's metadata; the fields of ``PagedDecode`` for T tokens, and:

    Attributes:
        query_starts: [B + 1] int32 or int64, first token of each request in this call.
        ends: [N] int32 or int64, the tokens that end a window, -1 in unused places: see
            ``window_ends``.
    """

    state_layout: ClassVar[StateLayout] = "paged"

    positions: torch.Tensor
    state_slots: torch.Tensor
    requests: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    ends: torch.Tensor

    def __post_init__(self) -> None:
        _check_paged(self)
        check_index("query_starts", self.query_starts, ("B + 1",), self.positions.device)
        check_index("ends", self.ends, ("N",), self.positions.device)

    def kernel_arguments(self) -> dict[str, Argument]:
        return {
            **_paged_arguments(self),
            "window_end_ptr": self.ends,
            "query_start_ptr": self.query_starts,
            "num_windows": self.num_windows,
            "num_tokens": self.num_tokens,
        }

    @cached_property
    def num_windows(self) -> int:
        return self.ends.shape[0]

    def window_ends(self, spec: CompressorSpec) -> Iterator[WindowEnd]:
        positions, table = self.positions.tolist(), self.block_table.tolist()
        requests, slots = self.requests.tolist(), self.slots.tolist()
        starts, rows = self.query_starts.tolist(), self.state_slots.tolist()
        for token in self.ends.tolist():
            if token >= 0 and rows[token] >= 0:
                request = requests[token]
                old = max(spec.window - (token - starts[request] + 1), 0)
                yield WindowEnd(token, positions[token] + 1, old, table[request], slots[token])

    def state_writes(self) -> Iterator[StateWrite]:
        return _paged_writes(self)


def _check_paged(plan: PagedDecode | PagedPrefill) -> None:
    check_index("positions", plan.positions, ("T",))
    tokens, device = plan.positions.shape[0], plan.positions.device
    check_index("state_slots", plan.state_slots, (tokens,), device)
    check_index("requests", plan.requests, (tokens,), device)
    check_index("slots", plan.slots, (tokens,), device)
    expect_shape("block_table", plan.block_table, ("B", "blocks"))
    expect_dtype("block_table", plan.block_table, torch.int32)
    expect_stride("block_table", plan.block_table, 1, 1)
    expect_device("block_table", plan.block_table, device)


def _paged_arguments(plan: PagedDecode | PagedPrefill) -> dict[str, Argument]:
    return {
        "position_ptr": plan.positions,
        "state_slot_ptr": plan.state_slots,
        "request_ptr": plan.requests,
        "block_table_ptr": plan.block_table,
        "stride_block_table_b": plan.block_table.stride()[0],
        "slot_ptr": plan.slots,
    }


def _paged_writes(plan: PagedDecode | PagedPrefill) -> Iterator[StateWrite]:
    positions = plan.positions.tolist()
    for token, row in enumerate(plan.state_slots.tolist()):
        if row >= 0:
            yield StateWrite(token, positions[token], row)


def window_ends(
    positions: torch.Tensor, state_slots: torch.Tensor, num_requests: int, compress_ratio: int
) -> torch.Tensor:
    """The tokens whose position ends a window, in order, without asking the device how many.

    Args:
        positions, state_slots: [T] as in ``PagedPrefill``; a state slot < 0 is padding.
        num_requests: requests in this call.
        compress_ratio: 4 or 128.

    Returns:
        [T // compress_ratio + num_requests] int32, or [T] if that is less, -1 after the last: each
        request has at most one end more than its tokens have full ratios.
    """
    expect_device("state_slots", state_slots, positions.device)
    tokens = positions.shape[0]
    size = min(tokens, tokens // compress_ratio + num_requests)
    is_end = ((positions + 1) % compress_ratio == 0) & (positions >= 0) & (state_slots >= 0)
    # Ends go to their rank; everything else to a place past the last, which is cut off.
    rank = torch.where(is_end, is_end.cumsum(0) - 1, size).clamp_(max=size)
    ends = torch.full((size + 1,), -1, dtype=torch.int32, device=positions.device)
    token = torch.arange(tokens, dtype=torch.int32, device=positions.device)
    return ends.scatter_(0, rank, token)[:size]
