"""Prefills of one step in several calls of a layer, where one would need much scratch memory.

Scratch memory has a place for every chunk of 64 tokens, and a request of a few tokens takes one as
well: 1,024 requests could need nine times as much as the tokens of a step alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kda_backend.spec import CHUNK

PARTIAL_CHUNKS = 16
"""Chunks of a call beyond those of as many tokens in one request."""


def divided(lengths: Sequence[int], most_chunks: int | None) -> Iterator[slice]:
    """Requests of these lengths in calls of at most so many chunks, or of one request."""
    first = chunks = 0
    for n, length in enumerate(lengths):
        own = -(-length // CHUNK)
        if most_chunks is not None and own and chunks and chunks + own > most_chunks:
            yield slice(first, n)
            first, chunks = n, 0
        chunks += own
    yield slice(first, len(lengths))
