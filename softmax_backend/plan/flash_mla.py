"""FlashMLA's schedule, as each of its releases for Hopper makes and lays it out.

A greedy contiguous fill: each part takes blocks of 64 tokens, and five more for each request that
it touches, until its payload is used up. The releases differ:

========  ======  ===============================  ==========================================
release   column  0 to 4                           what else
========  ======  ===============================  ==========================================
2025-04   tokens  first request, first token,      a request without tokens has no block; the
                  last request, end token, split   payload is at least 10
2025-09   blocks  first request, first block,      a request without tokens counts as one block
                  last request, end block, split
2026-01   blocks  first request, last request,     as 2025-09; columns 5 and 6 say whether the
                  first block, end block, split    part's first and last requests are shared
========  ======  ===============================  ==========================================

FlashMLA does not write the columns after these; they are 0 here. vLLM's fork of 2025 differs in
parts without work, whose first request is -1. The kernels of this package read the columns of
2025-09. The number of parts follows from the SMs and query rows alone: whether the attention is
causal has no part in it.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

BLOCK = 64
OVERHEAD = 5
Release = Literal["2025-04", "2025-09", "2026-01"]
RELEASES: tuple[Release, ...] = get_args(Release)
_COLUMNS_2026 = [0, 2, 1, 3, 4]


def num_parts(sms: int, query_rows: int) -> int:
    """``num_sm_parts`` of one key head: an SM for every 64 query rows of a part."""
    return max(sms // -(-query_rows // BLOCK), 1)


def flash_mla_schedule(
    lengths: torch.Tensor, parts: int, release: Release = "2025-09"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The schedule by hand: the definition that the kernel is compared with.

    Args:
        lengths: ``[requests]`` int32 tokens.
        parts: rows of the work list.

    Returns:
        (work ``[parts, 8]`` in the columns of 2025-09, num_splits ``[requests + 1]``), int32.
    """
    sizes = lengths.tolist()
    empty = 0 if release == "2025-04" else 1
    blocks = [max(-(-n // BLOCK), empty) for n in sizes]
    payload = -(-(sum(blocks) + OVERHEAD * len(blocks)) // parts) + OVERHEAD
    if release == "2025-04":
        payload = max(payload, 2 * OVERHEAD)
    # in a part without work FlashMLA's first block is read past an array's end, where the last
    # block of the first request lies
    idle = 0 if release == "2025-04" else max(blocks[0] - 1, 0)
    rows, slots = [], [0]
    request = block = split = 0
    for _ in range(parts):
        begin = (request, block if request < len(blocks) else idle, split)
        left = payload
        while request < len(blocks):
            rest = blocks[request] - block
            if left >= rest + OVERHEAD:
                slots.append(slots[-1] + split + 1)
                left -= rest + OVERHEAD
                request, block, split = request + 1, 0, 0
                continue
            if left > OVERHEAD:
                block, split = block + left - OVERHEAD, split + 1
            break
        last = request if block else request - 1
        end = block or -(-sizes[request - 1] // BLOCK)
        rows.append([begin[0], begin[1], last, end, begin[2], 0, 0, 0])
    tensors = (torch.tensor(values, dtype=torch.int32) for values in (rows, slots))
    work, num_splits = (tensor.to(lengths.device) for tensor in tensors)
    return work, num_splits


def in_columns_of(release: Release, work: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """FlashMLA's ``tile_scheduler_metadata`` of a schedule that was made for this release.

    Args:
        work: ``[parts, 8]`` int32 in the columns of 2025-09.
        lengths: ``[requests]`` int32 tokens.
    """
    if release == "2025-09":
        return work
    begin, first, last, end, _ = work[:, :5].unbind(1)
    length = lengths[last.long()]
    if release == "2025-04":
        tokens = work.clone()
        tokens[:, 1], tokens[:, 3] = first * BLOCK, torch.minimum(end * BLOCK, length)
        return tokens
    blocks = ((length - 1).clamp(min=0) // BLOCK) + 1
    inside = (begin < lengths.shape[0]) & (first != 0)
    before_end = (end != blocks) & (length != 0)
    alone = begin == last
    flags = [inside | (alone & before_end), before_end | (alone & inside)]
    columns = [work[:, i] for i in _COLUMNS_2026]
    padding = torch.zeros_like(begin)
    return torch.stack([*columns, *(flag.int() for flag in flags), padding], 1)


def from_columns_of(release: Release, metadata: torch.Tensor) -> torch.Tensor:
    """The columns of 2025-09 of a ``tile_scheduler_metadata``."""
    if release == "2025-09":
        return metadata
    if release == "2025-04":
        work = metadata.clone()
        work[:, 1], work[:, 3] = metadata[:, 1] // BLOCK, (metadata[:, 3] + BLOCK - 1) // BLOCK
        return work
    return torch.cat([metadata[:, _COLUMNS_2026], torch.zeros_like(metadata[:, :3])], 1)
