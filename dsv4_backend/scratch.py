"""The memory in which programs that share a request of a decode step meet."""

from __future__ import annotations

import torch

from backend_core.launch.streams import StreamOrder, is_capturing


class ColumnScratch:
    """Memory of one layer, which lives as long: a CUDA graph of its calls needs its weights too.

    Calls on two streams take turns. What was grown out of is kept, since a graph may hold it. In a
    capture it does not grow: zeros that are written there are written in each replay and not
    before, so a call that needs more has memory of its own, which is kept too.
    """

    def __init__(self) -> None:
        self._room = -1  # requests
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reserve(
        self, requests: int, dim: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pooled rows ``[requests or more, dim]`` fp32, and how many programs of a request have
        arrived, int32: multiples of their number between launches."""
        if requests > self._room:
            size = 2 * requests if self._room > 0 and not is_capturing(device) else requests
            columns = torch.zeros(size, dim, dtype=torch.float32, device=device)
            made = columns, torch.zeros(size, dtype=torch.int32, device=device)
            self._kept.append(made)
            if is_capturing(device):
                return made
            self._room, self._now, self._order = size, made, StreamOrder(device)
        self._order.enter(*self._now)
        return self._now
