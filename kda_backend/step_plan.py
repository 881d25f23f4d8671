"""The work of one step: its ragged batch, described once per step without synchronising."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.contracts import (
    expect_dtype,
    expect_kernel_device,
    expect_stride,
    expect_tensors,
)
from backend_core.launch.streams import is_capturing, is_elsewhere, run_there
from backend_core.ready import Prepared
from kda_backend.spec import CHUNK

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

_TABLE_BLOCK = 128  # chunks of one program of the table's kernel
_FEW_HEADS = 8  # of a rank of four of Kimi-Linear
_TABLE_SEQUENCES = 16  # that it looks at together; more spill, of scalars at 32 on CDNA


class ChunkTable(NamedTuple):
    """The tokens of each chunk of a ragged batch: int32 tensors on the device.

    Each is as long as a multiple of four, so that all begin on 16 bytes: kernels are compiled for
    what is aligned. What lies behind the entries is arbitrary.

    Attributes:
        start, length: ``[capacity]``, first token and number of tokens of each chunk.
        chunk_major: ``[capacity]``, the chunks as scans of all sequences at once need them.
        sequence_major: ``[capacity]``, as scans of one sequence after the other do, longest first.
        offsets: ``[N + 1]``, first chunk of each sequence.
        sequence_order: ``[N]``, the sequences, longest first.
    """

    start: torch.Tensor
    length: torch.Tensor
    chunk_major: torch.Tensor
    sequence_major: torch.Tensor
    offsets: torch.Tensor
    sequence_order: torch.Tensor


@dataclass(frozen=True)
class StepPlan:
    """Frozen description of a packed batch, shared by all layers of a step.

    Attributes:
        cu_seqlens: ``[N + 1]`` int32 or int64 token offsets, on the inputs' device.
        cu_seqlens_cpu: the same as a tuple where the host knows them, else ``None``.
        num_tokens: ``T``, the number of packed tokens.
        num_sequences: ``N``.
        max_tokens: tokens of the longest sequence; ``None`` where the host does not know the
            lengths.
        num_chunks: the number of 64-token chunks, where each sequence starts a new chunk. It is
            exact if the host knows the lengths, and otherwise an upper bound for any lengths with
            this ``T`` and ``N``.
        max_chunks: the chunks of the longest sequence; if the host does not know the lengths, as if
            all were equal. The schedule of prefill is estimated from it.
        long_sequences: the number of sequences with more than half as many chunks as the longest;
            if the host does not know the lengths, all of them.
        chunk_table: on the device, which tokens each chunk covers; only the GPU paths need it.
        any_batch: a CUDA graph's, for any batch of ``T`` tokens in ``N`` rows, some of which may
            have neither tokens nor a slot. Launches are sized for all rows.
        prepared: the launches of calls of this plan, by their layout; they hold no address but the
            plan's.
    """

    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: tuple[int, ...] | None
    num_tokens: int
    num_sequences: int
    max_tokens: int | None
    num_chunks: int
    max_chunks: int
    long_sequences: int
    chunk_table: ChunkTable | None
    any_batch: bool = False
    prepared: Prepared = field(default_factory=Prepared, init=False, repr=False, compare=False)

    def as_one(self, value_heads: int) -> int | None:
        """The chunks of one sequence of all tokens, where launches for any batch are chosen for
        that; else ``None``.

        With few heads its chain of chunks takes most of the time, and a schedule shortens it. With
        more heads that schedule makes several sequences slower.
        """
        few = self.any_batch and value_heads <= _FEW_HEADS
        return -(-self.num_tokens // CHUNK) if few else None

    @functools.cached_property
    def chunk_begins(self) -> torch.Tensor:
        """``[num_chunks + 1]`` int32: the sequence that begins with a chunk, -1 for none; made at
        its first use, without a sync."""
        assert self.chunk_table is not None
        first = self.chunk_table.offsets[: self.num_sequences].long()
        begins = first.new_full((self.num_chunks + 1,), -1, dtype=torch.int32)
        # an empty sequence has the next one's first chunk, and the smaller number
        numbers = torch.arange(self.num_sequences, dtype=torch.int32, device=first.device)
        return begins.scatter_reduce_(0, first, numbers, "amax")


def build_step_plan(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    *,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_table: bool = True,
    any_batch: bool = False,
) -> StepPlan:
    """Describe a packed batch without reading the device from the host.

    Offsets in host memory (``cu_seqlens_cpu``, or ``cu_seqlens`` itself on a CPU) are checked.
    Offsets that are only on a GPU are trusted: they must not decrease, and start at 0 and end at
    ``num_tokens``, or with ``any_batch`` within these; tokens outside belong to no sequence.

    Args:
        cu_seqlens: ``[N + 1]`` int32 or int64.
        num_tokens: the packed length ``T``.
        cu_seqlens_cpu: the same values on the CPU. They give the exact number of chunks, so that
            the choice of the path and the sizes of launches are exact.
        chunk_table: build the device tables that the Triton kernels read. It must be ``False`` for
            tensors on a CPU, whose path reads none, unless Triton's interpreter is on.
        any_batch: as `StepPlan` has it; the host then knows no lengths.

    Raises:
        ValueError: wrong rank, dtype, device or values, or ``any_batch`` of one whose lengths are
            given.
    """
    if any_batch and cu_seqlens_cpu is not None:
        raise ValueError("any_batch is for lengths that the host does not know, got cu_seqlens_cpu")
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    if chunk_table:
        expect_kernel_device("cu_seqlens of a plan with a chunk table", cu_seqlens)
    host = cu_seqlens if cu_seqlens.device.type == "cpu" else cu_seqlens_cpu
    sequences = cu_seqlens.shape[0] - 1
    offsets: tuple[int, ...] | None = None
    max_tokens = None
    if host is not None:
        check_cu_seqlens("cu_seqlens_cpu", host)
        offsets = tuple(host.tolist())
        _check_offsets(offsets, num_tokens, sequences + 1)
        lengths = list(map(operator.sub, offsets[1:], offsets))
        max_tokens = max(lengths, default=0)
        counts = [(length + CHUNK - 1) // CHUNK for length in lengths]
        num_chunks, max_chunks = sum(counts), max(counts, default=0)
        long_sequences = sum(2 * count > max_chunks for count in counts)
    else:
        num_chunks = min(num_tokens, (num_tokens + (CHUNK - 1) * sequences) // CHUNK)
        max_chunks, long_sequences = -(-num_chunks // max(1, sequences)), sequences
        if any_batch:  # the longest chain of chunks that there may be
            max_chunks, long_sequences = -(-num_tokens // CHUNK), 1
    table = None
    if chunk_table:
        table = build_chunk_table(cu_seqlens, num_chunks)
    return StepPlan(
        cu_seqlens,
        offsets,
        num_tokens,
        sequences,
        max_tokens,
        num_chunks,
        max_chunks,
        long_sequences,
        table,
        any_batch,
    )


@functools.lru_cache(maxsize=64)
def equal_length_plan(batch: int, length: int, device: torch.device, chunk_table: bool) -> StepPlan:
    """The plan of ``batch`` sequences of ``length`` tokens, kept for the calls that follow, on any
    stream. It waits for the GPU once."""
    plan = _equal_length_plan(batch, length, device, chunk_table)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    _made[batch, length, device, chunk_table] = plan
    return plan


def plan_of_rows(q: torch.Tensor, chunk_table: bool) -> StepPlan:
    """`equal_length_plan` of the rows of ``q [B, T, H, K]``.

    In a CUDA graph's capture nothing waits: a plan that is not there yet is made by kernels of the
    graph, for this call alone, since nothing lies in its memory before a replay. A plan that a
    graph has seen is kept for good.
    """
    batch, length = q.shape[:2]
    key = batch, length, q.device, chunk_table
    if not is_capturing(q.device):
        return equal_length_plan(*key)
    plan = _made.get(key) or _equal_length_plan(*key)
    _in_graphs[id(plan)] = plan
    return plan


_made: weakref.WeakValueDictionary[tuple[int, int, torch.device, bool], StepPlan]
_made = weakref.WeakValueDictionary()  # those that `equal_length_plan` keeps
_in_graphs: dict[int, StepPlan] = {}


def _equal_length_plan(
    batch: int, length: int, device: torch.device, chunk_table: bool
) -> StepPlan:
    bounds = torch.arange(batch + 1, dtype=torch.int32, device="cpu") * length
    # made on the device: a copy from the host would wait
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    return build_step_plan(
        cu_seqlens, batch * length, cu_seqlens_cpu=bounds, chunk_table=chunk_table
    )


def check_cu_seqlens(name: str, cu_seqlens: torch.Tensor) -> None:
    if not isinstance(cu_seqlens, torch.Tensor):
        expect_tensors(**{name: cu_seqlens})
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must have shape [N + 1], got {list(cu_seqlens.shape)}")
    expect_dtype(name, cu_seqlens, torch.int32, torch.int64)
    expect_stride(name, cu_seqlens, 0, 1)


def _check_offsets(offsets: tuple[int, ...], num_tokens: int, expected_len: int) -> None:
    if len(offsets) != expected_len:
        raise ValueError(f"cu_seqlens_cpu must have {expected_len} entries, got {len(offsets)}")
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
    if offsets[-1] != num_tokens:
        raise ValueError(f"cu_seqlens must end at {num_tokens} tokens, got {offsets[-1]}")
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end < begin:
            raise ValueError(f"cu_seqlens must not decrease, got {begin} then {end} at entry {n}")


def build_chunk_table(cu_seqlens: torch.Tensor, capacity: int) -> ChunkTable:
    """The table of a batch, without a sync."""
    if is_elsewhere(cu_seqlens):
        return run_there(cu_seqlens, build_chunk_table, locals())
    n = cu_seqlens.shape[0] - 1
    sizes = [size + -size % 4 for size in (*(capacity,) * 4, n + 1, n)]
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=cu_seqlens.device)
    table = ChunkTable(*memory.split_with_sizes(sizes))
    _chunk_table_kernel().launch(
        (max(1, -(-capacity // _TABLE_BLOCK)), 1, 1),
        cu_seqlens_ptr=cu_seqlens,
        chunk_start_ptr=table.start,
        chunk_len_ptr=table.length,
        chunk_offsets_ptr=table.offsets,
        chunk_major_ptr=table.chunk_major,
        sequence_major_ptr=table.sequence_major,
        sequence_order_ptr=table.sequence_order,
        num_sequences=n,
        capacity=capacity,
    )
    return table


@functools.cache
def _chunk_table_kernel() -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.chunk_table import chunk_table_kernel

    constexprs = {"CHUNK": CHUNK, "BLOCK": _TABLE_BLOCK, "BLOCK_N": _TABLE_SEQUENCES}
    return KernelLaunch(chunk_table_kernel, constexprs, {"num_warps": 4})
