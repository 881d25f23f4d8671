"""How a ragged batch is cut into chunks, for the kernels that work chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK = 64  # tokens


class ChunkTable(NamedTuple):
    """Which tokens each chunk of a ragged batch covers: int32 tensors on the device.

    Attributes:
        start, length: ``[capacity]``, first token and number of tokens of each chunk.
        abreast: ``[capacity]``, the chunks as scans of all sequences at once need them.
        in_turn: ``[capacity]``, as scans of one sequence after the other do, longest first.
        offsets: ``[N + 1]``, first chunk of each sequence.
        sequence_order: ``[N]``, the sequences, longest first.
    """

    start: torch.Tensor
    length: torch.Tensor
    abreast: torch.Tensor
    in_turn: torch.Tensor
    offsets: torch.Tensor
    sequence_order: torch.Tensor
