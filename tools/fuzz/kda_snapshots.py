"""Snapshots of a random prefill: which are asked for, where they go, and what must have come."""

from __future__ import annotations

import torch

from kda_backend.contract.values import StateRef
from tools.fuzz.batches import Draw, expect_untouched

_UNTOUCHED = 12345.0
_EACH = 2  # snapshots of a sequence


class Snapshots:
    """Two of each sequence: one after another, or in slots of a pool."""

    def __init__(
        self,
        draw: Draw,
        sequences: int,
        state_shape: torch.Size,
        device: torch.device,
        state_dtype: torch.dtype,
    ) -> None:
        """``state_dtype``: of the states, which slots of a pool have too."""
        number, size = _EACH * sequences, state_shape.numel()
        marks = [
            draw.choice(f"snapshot {i // _EACH} {i % _EACH}", (-1, 0, 1, 2, 3, 9))
            for i in range(number)
        ]
        self._chunks = torch.tensor(marks, dtype=torch.int32, device=device).view(-1, _EACH)
        self._slots: torch.Tensor | None = None
        slots, stride, dtype = list(range(number)), size, torch.float32
        if draw.chance("snapshots in a pool", 0.5):
            slots = draw.shuffled(range(number + 2))[:number]
            slots = [-1 if draw.chance(f"no slot {i}", 0.2) else x for i, x in enumerate(slots)]
            self._slots = torch.tensor(slots, dtype=torch.int32, device=device).view(-1, _EACH)
            stride += draw.choice("elements between snapshots", (0, 1, 16))
            dtype = state_dtype
        self._where = slots
        self._memory = torch.empty(number + 2, stride, dtype=dtype, device=device)
        self._states = torch.unflatten(self._memory[:, :size], 1, state_shape)

    def fill(self) -> None:
        self._memory.fill_(_UNTOUCHED)

    def added_to(self, state: StateRef) -> StateRef:
        """What a prefill is asked for."""
        if self._slots is not None:
            return state.with_snapshots(self._chunks, self._states, self._slots)
        in_order = torch.unflatten(self._states[:-2], 0, (-1, _EACH))
        return state.with_snapshots(self._chunks, in_order)

    def compared(
        self, lengths: list[int], chunk_states: torch.Tensor, after: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(got, expected) ``[1, HV, V, K]`` of each snapshot that must have been written.

        Args:
            chunk_states: before each chunk; after: of each sequence.

        Raises:
            MismatchError: something else was written.
        """
        found, first = [], 0
        rest = self._memory.clone()
        for n, length in enumerate(lengths):
            chunks = -(-length // 64)
            for i, mark in enumerate(self._chunks[n].tolist()):
                slot = self._where[_EACH * n + i]
                if slot < 0 or not 0 <= mark <= chunks:
                    continue
                want = after[n] if mark == chunks else chunk_states[first + mark]
                found.append((self._states[slot][None], want[None]))
                rest[slot, : want.numel()] = _UNTOUCHED
            first += chunks
        expect_untouched("memory of no snapshot", torch.full_like(rest, _UNTOUCHED), rest)
        return found
