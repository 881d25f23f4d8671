"""The work of one step: made once on the device from the lengths, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from backend_core.ready import Prepared


@dataclass(frozen=True)
class SharedPrefix:
    """The second level of a plan: query rows of several requests that meet the same keys.

    Attributes:
        tiles: ``[num_tiles, 8]`` int32 per query tile: offset into ``members``, first row, rows,
            first token, end token, flags (1: always partial, 2: no causal mask).
        tile_lengths: ``[num_tiles]`` int32: tokens of the tile, -1 where there is none.
        members: ``[2 * requests]`` int32: requests group by group, then all in order.
        prefix_tile: ``[requests]`` int32: first tile of the request's prefix, or -1.
        prefix_row: ``[requests]`` int32: the request's first row among its group's rows.
        num_prefix_tiles: capacity of tiles for prefixes, after the requests' own.
        leader, shared: ``[requests]`` int32: the first request with the same first page, and the
            tokens shared with it.
        num_heads: query heads that the tiles were made for: their rows are query tokens times
            heads.
        work: ``[ctas, 8]`` int32, or ``None``: a list of the prefixes' tiles alone, which a launch
            of its own computes. The plan's own list is then of the requests' tiles, as without
            shared prefixes.
    """

    tiles: torch.Tensor
    tile_lengths: torch.Tensor
    members: torch.Tensor
    prefix_tile: torch.Tensor
    prefix_row: torch.Tensor
    num_prefix_tiles: int
    leader: torch.Tensor
    shared: torch.Tensor
    num_heads: int
    work: torch.Tensor | None = None


@dataclass(frozen=True)
class MlaPlan:
    """A work list of fixed capacity. The same tensors serve any lengths, so a CUDA graph may hold
    the planning as well as the calls that use it.

    A *query tile* is the rows of one request (query tokens times heads), or of a shared prefix up
    to 64 rows of several requests; a *block* is 64 tokens of its keys. Each CTA walks consecutive
    blocks of consecutive tiles. A tile of which several CTAs have blocks leaves *splits*, each in a
    *slot* of the scratch memory, that combine merges.

    Attributes:
        lengths: ``[requests]`` int32: tokens in the cache, the query's own included.
        work: ``[ctas, 8]`` int32: first tile, first block, last tile, end block, number of the
            first split. A CTA without work has a first tile
            beyond its last.
        num_splits: ``[tiles + 1]`` int32: a prefix sum; the first slot of each tile. Where prefixes
            have a list of their own, theirs follows.
        query_tokens: per request.
        num_slots: capacity of the scratch memory.
        prefix: where a shared prefix is a level of its own.
        merges: ``[1 + requests]`` int32: how many requests are to be merged, and which; ``None``
            where the planner leaves no list.
        starts: scratch of the planner.
        prepared: the launches of calls of this plan, by their layout (`mla_backend.api`).
    """

    lengths: torch.Tensor
    work: torch.Tensor
    num_splits: torch.Tensor
    query_tokens: int
    num_slots: int
    prefix: SharedPrefix | None = None
    merges: torch.Tensor | None = None
    starts: torch.Tensor | None = field(default=None, repr=False)
    prepared: Prepared = field(default_factory=Prepared, init=False, repr=False, compare=False)

    @property
    def requests(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_ctas(self) -> int:
        return self.work.shape[0]

    @property
    def device(self) -> torch.device:
        return self.lengths.device
