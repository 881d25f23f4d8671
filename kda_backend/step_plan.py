"""What a step's ragged batch looks like to the prefill kernels; built once a step, never synced."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backend_core.contracts import expect_stride

if TYPE_CHECKING:
    from kda_backend.kernels.chunk_table import ChunkTable

CHUNK = 64


@dataclass(frozen=True)
class ChunkMetadata:
    """Frozen description of a packed batch, shared by all layers of a step.

    Attributes:
        cu_seqlens: ``[N + 1]`` int32 or int64 token offsets, on the inputs' device.
        cu_seqlens_cpu: the same as a tuple where the host knows them, else ``None``.
        num_tokens: ``T``, the number of packed tokens.
        num_chunks: 64-token chunks, each sequence's counted on its own; exact where the host knows
            the lengths, else the bound that any lengths with this ``T`` and ``N`` respect.
        max_chunks: chunks of the longest sequence; where the host does not know the lengths, as if
            all were equal. Layouts are estimated from it.
        long_sequences: those with more than half as many chunks; all where the host does not know.
        chunk_table: which tokens each chunk covers, on the device; for the GPU paths alone.
    """

    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: tuple[int, ...] | None
    num_tokens: int
    num_chunks: int
    max_chunks: int
    long_sequences: int
    chunk_table: ChunkTable | None

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1


def build_metadata(
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    *,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_table: bool = True,
) -> ChunkMetadata:
    """Describe a packed batch without reading the device from the host.

    The values are checked where they are in host memory (``cu_seqlens_cpu``, or ``cu_seqlens``
    itself on a CPU). A GPU tensor alone is trusted: it must start at 0, not decrease and end at
    ``num_tokens``.

    Args:
        cu_seqlens: ``[N + 1]`` int32 or int64.
        num_tokens: the packed length ``T``.
        cu_seqlens_cpu: the same values on the CPU; gives the exact number of chunks, which makes
            the grid measure and the launches exact.
        chunk_table: build the device tables that the Triton kernels read.

    Raises:
        ValueError: wrong rank, dtype or values.
    """
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    host = cu_seqlens if cu_seqlens.device.type == "cpu" else cu_seqlens_cpu
    lengths: tuple[int, ...] | None = None
    if host is not None:
        check_cu_seqlens("cu_seqlens_cpu", host)
        lengths = tuple(host.tolist())
        _check_offsets(lengths, num_tokens, cu_seqlens.shape[0])
        counts = [(end - begin + CHUNK - 1) // CHUNK for begin, end in itertools.pairwise(lengths)]
        num_chunks, max_chunks = sum(counts), max(counts, default=0)
        long_sequences = sum(2 * count > max_chunks for count in counts)
    else:
        sequences = cu_seqlens.shape[0] - 1
        num_chunks = min(num_tokens, (num_tokens + (CHUNK - 1) * sequences) // CHUNK)
        max_chunks, long_sequences = -(-num_chunks // max(1, sequences)), sequences
    table = None
    if chunk_table:
        from kda_backend.kernels.chunk_table import build_chunk_table

        table = build_chunk_table(cu_seqlens, num_chunks)
    return ChunkMetadata(
        cu_seqlens, lengths, num_tokens, num_chunks, max_chunks, long_sequences, table
    )


@functools.lru_cache(maxsize=64)
def equal_length_metadata(
    batch: int, length: int, device: torch.device, chunk_table: bool
) -> ChunkMetadata:
    """Metadata of ``batch`` sequences of ``length`` tokens; kept, since it has no other content."""
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32) * length
    return build_metadata(
        cu_seqlens.to(device), batch * length, cu_seqlens_cpu=cu_seqlens, chunk_table=chunk_table
    )


def check_cu_seqlens(name: str, cu_seqlens: torch.Tensor) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must have shape [N + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = str(cu_seqlens.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must have dtype int32 or int64, got {got}")
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
