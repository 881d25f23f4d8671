"""Random steps of drafting and accepting with records in place of states, against float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backend_core.target import Target
from kda_backend import kda_commit_, kda_verify_step
from kda_backend.testing.records import KEY_ERROR, RecordedDrafts
from kda_backend.testing.steps import StepCase
from tools.fuzz.batches import Draw, FuzzBatch, FuzzCase, MismatchError, expect_untouched, worst
from tools.fuzz.kda import state_error
from tools.fuzz.kda_steps import Rows, output_error, tolerances

LONGEST = 8


class _Records(Rows):
    """Two verifications, the second with what is held of the first, and a fold.

    Which tokens are accepted comes with the contents, so a captured graph is replayed with other
    counts than it was captured with.
    """

    def __init__(self, draw: Draw, target: Target, device: torch.device) -> None:
        count = draw.integer("sequences", 1, 4)
        longest = draw.integer("longest", 1, LONGEST)
        lengths = [draw.integer(f"length {n}", 0, longest) for n in range(count)]
        lengths[-1] = longest
        super().__init__("verify_records", draw, target, device, 2 * sum(lengths))
        self.drafts = RecordedDrafts(
            self.case,
            lengths,
            seed=draw.seed(),
            state_dtype=self.layer.state_dtype,
            layout=self.layer.layout,
            rolls=True,
        )
        padded = {n for n in range(count) if draw.chance(f"padded {n}", 0.15)}
        self.drafts.padded = padded
        ints = self.drafts.ints
        self.state, self.rows = self.drafts.state(), ints(self.drafts.rows)
        none = ints([0] * count)
        self.counts = [none, none.clone(), none.clone()]
        self.inputs = [self.drafts.draft(counts) for counts in self.counts[:2]]
        self.parts = [self._part(step) for step in range(2)]
        self.outs = [torch.empty_like(part.z) for part in self.parts]
        self.keys = [torch.empty_like(self.drafts.records.key_gate) for _ in range(2)]

    def _part(self, step: int) -> StepCase:
        tokens = self.drafts.tokens(step)
        return self.case.part(slice(tokens.start, tokens.stop))

    def fill(self, seed: int) -> None:
        self.refill(seed)
        self.drafts.fill(seed + 1)
        rng = torch.Generator().manual_seed(seed + 2)
        self.accepted = [
            [int(torch.randint(1, n + 1, (), generator=rng)) if n else 0 for n in lengths]
            for lengths in [self.drafts.lengths] * 2
        ]
        for held, accepted in zip(self.counts[1:], self.accepted, strict=True):
            held.copy_(self.drafts.ints(accepted))
        for out in self.outs:
            out.fill_(torch.nan)
        self.before = self.drafts.pools.copy()

    def run(self) -> None:
        x = self.drafts
        steps = zip(self.parts, self.inputs, self.outs, self.keys, strict=True)
        for part, draft, out, keys in steps:
            kda_verify_step(
                *part.inputs,
                self.state,
                draft,
                out=out,
                selection=self.selection,
                **part.stages(x.pools.windows),
            )
            keys.copy_(x.records.key_gate)  # which the next step writes over
        kda_commit_(
            self.case.inputs[1],
            self.state,
            x.records,
            self.rows,
            self.counts[2],
            selection=self.selection,
        )

    def error(self) -> tuple[float, float]:
        x, found = self.drafts, []
        output, state = tolerances(self.layer)
        for step, (accepted, keys) in enumerate(zip(self.accepted, self.keys, strict=True)):
            x.expect(step, keys)
            out = self.outs[step].cpu()
            for n, draft in enumerate(x.drafts):
                own = slice(x.offsets[n], x.offsets[n + 1])
                if n in x.padded:
                    if bool(out[own].any()):
                        raise MismatchError("the output of a padded sequence is not zero")
                    continue
                if draft.key_error > KEY_ERROR[self.case.packed.dtype]:
                    raise MismatchError(f"a recorded key is off by {draft.key_error:.1e}")
                found.append(output_error(out[own], draft.out, output))
            x.accept(accepted)
        live = [n for n in range(len(x.lengths)) if n not in x.padded]
        for n in live:
            got = x.pools.states[x.slots[n]].cpu()[None]
            found.append(state_error(got, x.states[n][None], 3.0 * state))
            window = self.before.windows[x.slots[n]]
            self._check_window(n, x.pools.windows[x.slots[n]], window)
            self.before.states[x.slots[n]] = x.pools.states[x.slots[n]]
            window.copy_(x.pools.windows[x.slots[n]])
        expect_untouched("a state elsewhere", self.before.memory, x.pools.memory)
        expect_untouched("a window elsewhere", self.before.window_memory, x.pools.window_memory)
        return worst(*found) if found else (0.0, output)

    def _check_window(self, n: int, got: torch.Tensor, before: torch.Tensor) -> None:
        """The columns from the last accepted token on, or all where nothing was drafted."""
        x = self.drafts
        if not self.case.has_conv or not x.lengths[n]:
            same = torch.equal(got.nan_to_num(), before.nan_to_num())
        else:
            column = x.held[n] - 1
            same = torch.equal(got[:, column : column + 3].double().cpu(), x.windows[n])
        if not same:
            raise MismatchError("a convolution window differs from that of the definition")


def records_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """Random calls of ``kda_verify_step`` with records, and of ``kda_commit_``."""
    records = _Records(draw, target, device)
    return FuzzBatch(records.fill, records.run, records.error)


CASES: Mapping[str, FuzzCase] = {"verify_records": records_case}
