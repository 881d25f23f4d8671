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
