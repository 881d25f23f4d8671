"""FlashInfer's packed masks: segments of bits, each from a byte of its own, lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor


def unpacked(name: str, packed: Tensor, lengths: Tensor) -> Tensor:
    """The elements of all segments, one after another, as ``segment_packbits`` packs them.

    Args:
        name: of the argument, for messages.
        packed: uint8; bytes beyond the last segment are not read.
        lengths: int64 [S] on the host, elements of each segment.

    Returns:
        bool [sum of lengths], on the device of ``packed``.

    Raises:
        ValueError: ``packed`` is not uint8, or has fewer bytes than the segments.
    """
    bytes_of = -(-lengths // 8)
    total = int(bytes_of.sum())
    if packed.dtype != torch.uint8 or packed.dim() != 1 or len(packed) < total:
        raise ValueError(
            f"{name} must be uint8 [{total}], each of the {len(lengths)} segments from a byte of "
            f"its own, got {packed.dtype} {list(packed.shape)}"
        )
    device = packed.device
    bits = packed[:total, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    # what is left of a segment's last byte is no element
    gap = (8 * bytes_of - lengths).cumsum(0) - (8 * bytes_of - lengths)
    at = torch.arange(int(lengths.sum())) + gap.repeat_interleave(lengths)
    return bits.flatten()[at.to(device)] != 0


def bsr_mask(packed: Tensor, indptr: Tensor, q_len: int, row_size: int, col_size: int) -> Tensor:
    """The mask of BSR blocks, bool [nnz, row_size, col_size], of one that is packed as FlashInfer
    lays it out: a segment for each block row, [queries, blocks of the row, col_size].

    Raises:
        ValueError: as in ``unpacked``, or ``indptr`` is of another matrix.
    """
    begin, blocks = indptr.cpu().long(), -(-q_len // row_size)
    count = begin.diff()
    if begin.shape != (blocks + 1,) or int(begin[0]) != 0 or int(count.min()) < 0:
        raise ValueError(
            f"indptr must have shape [{blocks + 1}], begin at 0 and not fall, got {begin.tolist()}"
        )
    first = torch.arange(len(count)) * row_size
    lengths = (q_len - first).clamp(max=row_size) * count * col_size
    elements = unpacked("packed_mask", packed, lengths)
    row = torch.arange(len(count)).repeat_interleave(count)
    place = torch.arange(int(begin[-1])) - begin[row]
    start = (lengths.cumsum(0) - lengths)[row] + place * col_size
    r, c = torch.arange(row_size)[:, None], torch.arange(col_size)
    at = start[:, None, None] + r * (count[row] * col_size)[:, None, None] + c
    inside = (first[row][:, None, None] + r < q_len).expand_as(at)
    found = elements[at.masked_fill(~inside, 0).to(packed.device)]
    return found & inside.to(packed.device)
