"""Scratch memory of the prefill kernels."""

from __future__ import annotations

import itertools

import torch

from backend_core.launch.streams import StreamOrder, is_capturing

_COUNTERS = 5


class Scratch:
    """The memory through which the intra-chunk stage passes its results to the scan.

    It grows to the largest step and is kept. One instance serves all layers of a model, which run
    one after another on one stream; calls on two streams take turns
    (`backend_core.launch.streams`). Let it grow (``reserve``) before a CUDA graph is captured. A
    graph keeps the addresses that it has seen, so memory that a capture has used is kept when a
    larger one replaces it.
    """

    def __init__(self, device: torch.device) -> None:
        # none yet, in as few tensors as there are dtypes: a call without a scratch makes its own
        self._tiles = self._segments = torch.empty(0, dtype=torch.uint8, device=device)
        self._totals = torch.empty(0, dtype=torch.float32, device=device)
        self._flags = self._segment_flags = torch.empty(0, dtype=torch.int32, device=device)
        self._asked = (0, 0, 0)
        self._addresses: tuple[int, int, int] | None = None
        # flags that were made in a capture: zeros in replays of that graph and nowhere else
        self._flags_of_graph = self._segment_flags_of_graph = False
        self._in_graphs: dict[int, torch.Tensor] = {}  # by address
        self._order = StreamOrder(device)

    def expect_device(self, device: torch.device) -> None:
        """Raise ``ValueError`` where this memory is not on ``device``."""
        if self._tiles.device != device:
            raise ValueError(f"scratch must be on {device}, got {self._tiles.device}")

    def reserve(self, num_tiles: int, tile_bytes: int, key_dim: int) -> None:
        """Make room for ``num_tiles`` (chunks times value heads) of ``tile_bytes`` and ``K``."""
        asked = (num_tiles, tile_bytes, key_dim)
        is_there = asked == self._asked and self._addresses is not None
        if is_there and not self._flags_of_graph:  # as the other layers of a step ask
            return
        self._asked, self._addresses = asked, None  # until the memory is there
        tiles, totals, flags = self._tiles, self._totals, self._flags
        size = max(16, num_tiles * tile_bytes)  # memory without a byte has no address
        if size > tiles.shape[0]:
            tiles = tiles.new_empty(size)
        if num_tiles * key_dim > totals.shape[0]:
            totals = totals.new_empty(num_tiles * key_dim)
        flags, of_graph = self._zeroed(flags, num_tiles + _COUNTERS, self._flags_of_graph)
        self._flags_of_graph = of_graph
        self._tiles, self._totals, self._flags = tiles, totals, flags
        self._addresses = (tiles.data_ptr(), totals.data_ptr(), flags.data_ptr())

    def _zeroed(self, flags: torch.Tensor, size: int, of_graph: bool) -> tuple[torch.Tensor, bool]:
        """At least ``size`` flags for a call: as kernels have left them, or zeros; and whether they
        are a graph's."""
        capturing = is_capturing(flags.device)
        if size > flags.shape[0] or (of_graph and not capturing):
            return flags.new_zeros(max(size, flags.shape[0])), capturing
        if of_graph:
            flags.zero_()  # in this capture too, of that graph or of another one
        return flags, of_graph

    def buffers(
        self, num_tiles: int, tile_bytes: int, key_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tiles, uint8; total decays, fp32), flat and at least as large as asked for, for a call
        on the current stream."""
        self._order.enter(
            self._tiles, self._totals, self._flags, self._segments, self._segment_flags
        )
        self.reserve(num_tiles, tile_bytes, key_dim)
        self._keep_in_capture(self._tiles, self._totals, self._flags)
        return self._tiles, self._totals

    def _keep_in_capture(self, *memory: torch.Tensor) -> None:
        if is_capturing(self._tiles.device):
            self._in_graphs |= {tensor.data_ptr(): tensor for tensor in memory}

    def addresses(self, num_tiles: int, tile_bytes: int, key_dim: int) -> tuple[int, int, int]:
        """Where those of `buffers` and `flags` lie."""
        self.buffers(num_tiles, tile_bytes, key_dim)
        assert self._addresses is not None
        return self._addresses

    def segment_addresses(self, places: int, sizes: tuple[int, ...], flags: int) -> list[int]:
        """Where what segments leave for one another lies, for the call that `buffers` was for.

        Args:
            places: segments times value heads.
            sizes: bytes of each kind of result at a place, multiples of 128.
            flags: int32 at a place; zeros at first, then kernels write them.

        Returns:
            The addresses of each kind, ``[places, size]``, and of the flags, ``[places, flags]``.
        """
        if places * sum(sizes) > self._segments.shape[0]:
            self._segments = self._segments.new_empty(places * sum(sizes))
        self._segment_flags, self._segment_flags_of_graph = self._zeroed(
            self._segment_flags, places * flags, self._segment_flags_of_graph
        )
        self._keep_in_capture(self._segments, self._segment_flags)
        begins = itertools.accumulate(sizes[:-1], initial=0)
        kinds = [self._segments.data_ptr() + places * begin for begin in begins]
        return [*kinds, self._segment_flags.data_ptr()]

    def flags(self) -> torch.Tensor:
        """Five counters and a flag per tile, int32: zeros at first, then kernels write them."""
        return self._flags

    def clear_flags(self) -> None:
        """Set the flags to zero again, after a call whose scan could not be launched."""
        self._flags.zero_()

    @property
    def nbytes(self) -> int:
        now = (self._tiles, self._totals, self._flags, self._segments, self._segment_flags)
        kept = {tensor.data_ptr(): tensor for tensor in now} | self._in_graphs
        return sum(tensor.nbytes for tensor in kept.values())
