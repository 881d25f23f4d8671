"""SplitScratch memory for the splits of a step."""

from __future__ import annotations

import torch

from backend_core.launch.streams import StreamOrder

_VIEWS = 256  # sizes that a scratch memory remembers


class SplitScratch:
    """Partial outputs and their log-sum-exp, grown to the largest plan and kept.

    One serves all layers of a model, which run one after another on one stream; calls on two
    streams take turns (`backend_core.launch.streams`). Grow it before a
    CUDA graph is captured (``reserve``): a graph keeps the addresses it has seen, for which reason
    memory that has been outgrown is kept too.
    """

    def __init__(self, device: torch.device) -> None:
        self._out = torch.empty(0, dtype=torch.float32, device=device)
        self._lse = torch.empty(0, dtype=torch.float32, device=device)
        self._outgrown: list[torch.Tensor] = []
        self._views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._order = StreamOrder(self._out.device)  # with its number, where the caller gave none

    def reserve(self, slots: int, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(partial outputs ``[slots, rows, dim]``, base-2 LSEs ``[slots, rows]``), float32, for a
        call on the current stream."""
        self._order.enter(self._out, self._lse)
        sizes = slots, rows, dim
        return self._views.get(sizes) or self._views.setdefault(sizes, self._view(*sizes))

    def _view(self, slots: int, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._views) >= _VIEWS:
            self._views.clear()
        if slots * rows * dim > self._out.numel():
            larger = self._out.new_empty(slots * rows * dim)  # whatever torch's default dtype
            self._views.clear()
            self._outgrown.append(self._out)
            self._out = larger
        if slots * rows > self._lse.numel():
            larger = self._lse.new_empty(slots * rows)
            self._views.clear()
            self._outgrown.append(self._lse)
            self._lse = larger
        return (
            self._out[: slots * rows * dim].view(slots, rows, dim),
            self._lse[: slots * rows].view(slots, rows),
        )

    def expect_device(self, device: torch.device) -> None:
        """Raise ``ValueError`` unless the memory is where a call's tensors are."""
        if self._out.device != device:
            raise ValueError(f"scratch must be on {device}, got {self._out.device}")

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self._out, self._lse, *self._outgrown))


_shared: dict[torch.device, SplitScratch] = {}


def shared_scratch(device: torch.device) -> SplitScratch:
    """The device's own, for calls that bring none."""
    return _shared.setdefault(device, SplitScratch(device))


def scratch_of_call(given: SplitScratch | None, device: torch.device) -> SplitScratch:
    """The scratch that a call brings, which must be on the device of its tensors, or the device's.

    Raises:
        ValueError: the scratch is on another device.
    """
    if given is None:
        return shared_scratch(device)
    given.expect_device(device)
    return given
