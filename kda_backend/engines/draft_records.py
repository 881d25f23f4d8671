"""Whether an engine's drafts are kept as records or as the state after each token, and the gates
that a fold of records reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backend_core.strict import choice
from backend_core.target import Target

VARIABLE = "KDA_DSV4_DRAFT_RECORDS"
"""``1`` asks for records on every GPU and of drafts of any length, ``0`` for states."""


def asked() -> bool | None:
    """The user's wish; ``None`` where that is left to `wanted`.

    Raises:
        ValueError: the variable has another value than 0 or 1.
    """
    return choice(VARIABLE)


def wanted(target: Target, tokens: int, fewest: int) -> bool:
    """Whether drafts of so many tokens are kept as records: as the user says, else on Hopper.

    Args:
        tokens: with the one that is verified besides; fewest: from which on a step with its commit
            was measured to be faster than with states.
    """
    if (wish := asked()) is not None:
        return wish
    return target.arch.startswith("sm90") and tokens >= fewest


class LayerGates:
    """The gates of several layers in one tensor each, with the weights as they are when they are
    read: an engine may load them anew.

    Args:
        layers: L of an engine's, with parameters ``A_log`` and ``dt_bias`` laid out alike.
        a_log: ``[L, HV]``; dt_bias: ``[L, HV, K]`` or ``[L, HV * K]``: where they go.
    """

    def __init__(self, layers: Sequence[Any], a_log: torch.Tensor, dt_bias: torch.Tensor) -> None:
        self._gates = a_log, dt_bias
        self._weights = [weight for layer in layers for weight in (layer.A_log, layer.dt_bias)]
        rows = [row for pair in zip(a_log, dt_bias, strict=True) for row in pair]
        self._rows = [
            row.view(weight.shape) for row, weight in zip(rows, self._weights, strict=True)
        ]

    @classmethod
    def of(cls, layers: Sequence[Any]) -> LayerGates:
        """Gates in tensors of their own."""
        weights = layers[0].A_log, layers[0].dt_bias
        return cls(layers, *(x.new_empty(len(layers), x.numel()) for x in weights))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A_log and dt_bias of all layers, copied in one call."""
        with torch.no_grad():
            torch._foreach_copy_(self._rows, self._weights)
        return self._gates
