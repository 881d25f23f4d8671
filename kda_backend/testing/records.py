"""Steps of drafting and accepting with records in place of states, beside float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from backend_core.testing.numerics import poisoned
from kda_backend.contract.values import DraftInputs, Records, StateRef
from kda_backend.testing.steps import StepCase, StepPools


class ExpectedDraft(NamedTuple):
    """Results in float64 behind each token of a draft, from the keys that were recorded.

    Attributes:
        out: ``[T, HV, V]``; states: ``[T + 1, HV, V, K]``, windows: ``[T + 1, C, 3]``, the first
            before the draft.
        key_error: the largest distance of a recorded key's element from the definition's, as a
            share of its size, or of a hundredth of the keys': a rounding to the tokens' dtype.
    """

    out: torch.Tensor
    states: torch.Tensor
    windows: torch.Tensor
    key_error: float


def expected_draft(
    case: StepCase,
    tokens: Sequence[int],
    state: torch.Tensor,
    window: torch.Tensor,
    key_gate: torch.Tensor,
) -> ExpectedDraft:
    """A draft whose tokens are rows of the case.

    Args:
        state: ``[HV, V, K]``; window: ``[C, 3]``; both before the draft.
        key_gate: ``[HV, T, 2 K]``, its records.
    """
    states, windows = [state.double().cpu()], [window.double().cpu()]
    outputs: list[torch.Tensor] = []
    error, group = 0.0, case.value_heads // case.heads
    for t, token in enumerate(tokens):
        key = key_gate[::group, t, : case.g.shape[2]].double().cpu()
        exact = case.expected_keys([token], windows[-1][None])[0]
        size = torch.maximum(exact.abs(), 0.01 * exact.square().mean().sqrt())
        error = max(error, float(((key - exact).abs() / size).nan_to_num(math.inf).max()))
        o, s, w = case.expected_rows([token], states[-1][None], windows[-1][None], key[None])
        outputs.append(o[0])
        states.append(s[0])
        windows.append(w[0])
    out = torch.stack(outputs) if outputs else state.new_zeros(0, *case.z.shape[1:]).double()
    return ExpectedDraft(out, torch.stack(states), torch.stack(windows), error)


KEY_ERROR = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-4}
"""The most that `ExpectedDraft.key_error` may be, by dtype of the tokens: a unit in the last place,
since Triton's interpreter truncates; and of fp32's sums."""


class RecordedDrafts:
    """Sequences that draft and accept, several steps of them, in an engine's pools.

    The tokens of all steps are rows of one case: those of step i begin at ``i * sum(lengths)``. The
    convolution's windows roll in their pool, or go to buffers from which `accept` copies them.

    Attributes:
        lengths: tokens of the draft of each sequence.
        slots, rows: of each sequence, its state's and its records'.
        padded: sequences that have no slot in a call.
        states, windows: of each sequence, what float64 says of the last accepted token.
        held: accepted tokens that the states in the pool lack.
        drafts: what float64 says of the last step.
    """

    def __init__(
        self,
        case: StepCase,
        lengths: Sequence[int],
        *,
        seed: int,
        state_dtype: torch.dtype = torch.float32,
        layout: str = "SD",
        rolls: bool = True,
    ) -> None:
        count, device = len(lengths), case.packed.device
        self.case, self.lengths, self.rolls = case, tuple(lengths), rolls
        self.max_tokens = max(lengths)
        self.slots = [2 * n + 1 for n in range(count)]
        self.rows = [count - n for n in range(count)]
        self.padded: set[int] = set()
        width = self.max_tokens + 2 if rolls else 3
        self.pools = StepPools(case, 2 * count + 2, dtype=state_dtype, layout=layout, width=width)
        self.records = Records.empty(
            (count + 2,),
            self.max_tokens,
            heads=case.value_heads,
            key_dim=case.g.shape[2],
            value_dim=case.z.shape[2],
            dtype=case.packed.dtype,
            device=device,
        )
        shape = (count + 2, self.max_tokens, 3, case.channels)
        self.kept_windows = poisoned(*shape, dtype=case.packed.dtype, device=device)
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """States and windows before the first step; what no step has written is NaN."""
        self.pools.memory.fill_(math.nan)
        self.pools.window_memory.fill_(math.nan)
        self.pools.fill(seed, self.slots)
        for x in (*self.records[:2], self.kept_windows):
            x.fill_(math.nan)
        self.states = [self.pools.states[slot].double().cpu() for slot in self.slots]
        self.windows = [self.pools.windows[slot, :, :3].double().cpu() for slot in self.slots]
        self.held = [0] * len(self.lengths)
        self.drafts: list[ExpectedDraft] = []

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.case.packed.device)

    def state(self, **options: Any) -> StateRef:
        slots = [-1 if n in self.padded else slot for n, slot in enumerate(self.slots)]
        return StateRef.pool(self.pools.states, self.ints(slots), **options)

    def draft(self, num_accepted: torch.Tensor | None) -> DraftInputs:
        windows = self.kept_windows.transpose(2, 3)
        return DraftInputs.in_records(
            self.records,
            self.ints(self.rows),
            num_accepted,
            None if self.rolls or not self.case.has_conv else windows,
            self.ints(self.offsets),
        )

    def tokens(self, step: int) -> range:
        total = sum(self.lengths)
        return range(step * total, (step + 1) * total)

    def expect(self, step: int, key_gate: torch.Tensor | None = None) -> None:
        """Compute what float64 says of the step that was verified last, or of one that left
        ``key_gate``."""
        first, offsets = self.tokens(step).start, self.offsets
        key_gate = self.records.key_gate if key_gate is None else key_gate
        self.drafts = [
            expected_draft(
                self.case,
                range(first + offsets[n], first + offsets[n + 1]),
                self.states[n],
                self.windows[n],
                key_gate[row],
            )
            for n, row in enumerate(self.rows)
        ]

    def expected_out(self) -> torch.Tensor:
        zeroed = (n in self.padded for n in range(len(self.lengths)))
        pairs = zip(self.drafts, zeroed, strict=True)
        return torch.cat([torch.zeros_like(d.out) if pad else d.out for d, pad in pairs])

    def accept(self, counts: Sequence[int]) -> None:
        """Accept so many tokens of each draft; a sequence without tokens holds what it held.

        Where windows have buffers they are copied to their pool, as sglang does.
        """
        for n, count in enumerate(counts):
            if not self.lengths[n] or n in self.padded:
                continue
            self.held[n] = count
            self.states[n] = self.drafts[n].states[count]
            self.windows[n] = self.drafts[n].windows[count]
            if self.case.has_conv and not self.rolls and count:
                window = self.kept_windows[self.rows[n], count - 1].T
                self.pools.windows[self.slots[n]] = window
