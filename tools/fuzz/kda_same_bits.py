"""Random requests of a layer, whose bits must not depend on what else is served.

A request runs alone, its prompt in one step, and then among other requests, on a GPU `AMONG` times:
its prompt cut at multiples of 64 tokens, each step with other neighbours before and behind it,
other slots and other knowledge of the lengths. Outputs, state and window of the convolution are
compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backend_core.target import Target
from backend_core.testing.numerics import as_bytes
from kda_backend import layer
from kda_backend.contract.values import DraftInputs, StateRef
from kda_backend.layer import LayerWeights, Projections
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaShape, select
from kda_backend.spec import CHUNK
from kda_backend.step_plan import StepPlan, build_step_plan
from kda_backend.testing.cases import cu_tensor, offsets_of
from kda_backend.testing.steps import EPS, make_step
from tools.fuzz.batches import Draw, FuzzBatch, FuzzCase, MismatchError
from tools.fuzz.kda import EDGES, LONGEST, drawn_regimes

AMONG = 24
_NOISE = 256
"""Tokens of neighbours, which take them again and again."""
_DRAFT = 3
_HEADS = (1, 2, 4)
_LONGEST_ON_CPU = 130


@dataclass(frozen=True)
class _Step:
    """One call.

    Attributes:
        rows: the tokens of the call, as rows of the batch's tensors.
        slots: of its sequences; initial: which of them go on.
        lengths: of its sequences.
        own: the number of the request's sequence; slot: its slot; begin: its first token in the
            request.
        plan: of a prefill; tables: slots of drafts ``[N, 3]`` and their token offsets.
    """

    kind: str
    rows: torch.Tensor
    slots: torch.Tensor
    initial: torch.Tensor
    lengths: Sequence[int]
    own: int
    slot: int
    begin: int
    plan: StepPlan | None
    tables: tuple[torch.Tensor, torch.Tensor]


class _Request:
    """A request, alone and among others."""

    def __init__(self, kind: str, draw: Draw, target: Target, device: torch.device) -> None:
        self.device, self.target = device, target
        self.on_gpu = device.type == "cuda"
        self.heads = draw.choice("heads", _HEADS)
        self.gate = draw.choice("gate", ("softplus", "bounded"))
        self.regimes = drawn_regimes(draw, self.heads)
        self.longest = LONGEST if self.on_gpu else _LONGEST_ON_CPU
        edges = [edge for edge in EDGES if edge <= self.longest]
        self.prompt = max(1, draw.lengths("prompt", 1, edges, self.longest)[0])
        self.tokens = draw.integer("tokens", 1, 3) if kind == "decode" else 0
        self.drafts = draw.integer("drafts", 1, _DRAFT) if kind == "verify" else 0
        self.total = self.prompt + self.tokens + self.drafts
        dims = (self.heads, self.heads, 128, 128)
        shape = KdaShape(*dims, self.gate == "bounded", batch_invariant=True)
        self.selection = select(target, shape)
        self.scratch = Scratch(device)
        self.slots = 8 if not self.on_gpu else 8 + max(self._most_rows(), 64)
        self.case = self._make(draw.seed())
        self.memory = [x.clone() for x in self._drawn()]
        gate = self.case.inputs[1]._replace(a_log=self.memory[4], dt_bias=self.memory[5])
        self.weights = LayerWeights(self.memory[6], gate, self.memory[7], EPS)
        heads, dim = self.heads, 128
        self.windows = torch.empty(
            self.slots, 3 * heads * dim, 3 + _DRAFT, dtype=torch.bfloat16, device=device
        )
        self.states = torch.empty(self.slots, heads, dim, dim, device=device)
        self.alone = self._steps(draw, among=False)
        times = AMONG if self.on_gpu else 1
        self.among = [self._steps(draw, among=True) for _ in range(times)]
        out = (1 + times, self.total, heads, dim)
        self.out = torch.empty(out, dtype=torch.bfloat16, device=device)
        self.kept = [
            torch.empty(1 + times, *x.shape[1:], dtype=x.dtype, device=device)
            for x in (self.states, self.windows)
        ]

    def _most_rows(self) -> int:
        """Of a decode step: more than any row of the table has as its largest grid."""
        bounds = [row.max_grid or 0 for row in self.selection.decode_step.rows]
        return max(bounds) // self.heads + 8

    def _make(self, seed: int) -> Any:
        dims: dict[str, Any] = {"heads": self.heads, "key_dim": 128, "value_dim": 128}
        return make_step(
            seed,
            self.total + _NOISE,
            device=self.device,
            gate=self.gate,
            regime=self.regimes,
            has_bias=False,
            **dims,
        )

    def _drawn(self) -> tuple[torch.Tensor, ...]:
        """Projections of tokens, then weights."""
        x = self.case
        return x.packed, x.g, x.beta, x.z, *x.inputs[1][1:3], x.conv_weight, x.norm_weight

    def _steps(self, draw: Draw, *, among: bool) -> list[_Step]:
        cuts = [
            cut for cut in range(CHUNK, self.prompt, CHUNK) if among and draw.chance("cut", 0.5)
        ]
        slot = draw.integer("slot", 0, 7)
        found, begin = [], 0
        for end in (*cuts, self.prompt):
            others = self._others(draw) if among else []
            found.append(self._step("prefill", draw, slot, begin, end - begin, others))
            begin = end
        for _ in range(self.tokens):
            count = draw.choice("rows", (1, 2, 7)) if among else 1
            if self.on_gpu and among:
                count = draw.integer("rows", 1, self._most_rows())
            found.append(self._step("decode", draw, slot, begin, 1, [1] * (count - 1)))
            begin += 1
        if self.drafts:
            others = draw.lengths("drafted", 4, (0, 1), self.drafts) if among else []
            found.append(self._step("verify", draw, slot, begin, self.drafts, others))
        return found

    def _others(self, draw: Draw) -> list[int]:
        """Lengths of neighbours. On a GPU some steps have tiles for any schedule and form."""
        form = draw.choice(
            "neighbours", ("none", "few", "short", *(("many", "long") * self.on_gpu))
        )
        if form == "none":
            return []
        if form == "short":
            return draw.lengths("short", 3, (0, 1), 20)
        if form == "long":
            return [draw.integer("long", 4096, 6000), 3]
        return draw.lengths(form, 40 if form == "many" else 3, (0, 1, 64, 65), self.longest // 2)

    def _step(
        self, kind: str, draw: Draw, slot: int, begin: int, length: int, others: list[int]
    ) -> _Step:
        """The request's next tokens at any place among others."""
        own = draw.integer("place", 0, len(others))
        lengths = [*others[:own], length, *others[own:]]
        rows: list[int] = []
        noise = draw.integer("noise", 0, _NOISE - 1)
        for n, count in enumerate(lengths):
            if n == own:
                rows += range(begin, begin + length)
            else:
                rows += [self.total + (noise + i) % _NOISE for i in range(count)]
                noise += count
        free = [s for s in range(self.slots) if s != slot]
        slots = draw.shuffled(free)[: len(others)] if len(others) <= len(free) else []
        slots += [-1] * (len(others) - len(slots))
        slots.insert(own, slot)
        plan = None
        bounds = cu_tensor(lengths, torch.device("cpu"))
        if kind == "prefill":
            known = not self.on_gpu or draw.chance("lengths known", 0.7)
            plan = build_step_plan(
                bounds.to(self.device),
                len(rows),
                cu_seqlens_cpu=bounds if known else None,
                chunk_table=self.selection.target.vendor != "cpu",
            )
        initial = [n != own or begin > 0 for n in range(len(lengths))]
        on = self.device
        of_sequences = torch.tensor(slots, dtype=torch.int32, device=on)
        table = torch.full((len(slots), _DRAFT), -1, dtype=torch.int32, device=on)
        table[:, 0] = of_sequences  # the states after later tokens are not kept
        return _Step(
            kind,
            torch.tensor(rows, device=on),
            of_sequences,
            torch.tensor(initial, device=on),
            lengths,
            own,
            slot,
            begin,
            plan,
            (table, bounds.to(on)),
        )

    def fill(self, seed: int) -> None:
        self.case = self._make(seed)
        for own, drawn in zip(self.memory, self._drawn(), strict=True):
            own.copy_(drawn)

    def run(self) -> None:
        for number, steps in enumerate((self.alone, *self.among)):
            self.states.fill_(0.01)  # of neighbours
            self.windows.fill_(0.5)
            for step in steps:
                self._call(step, self.out[number])
            last = steps[-1]
            for kept, pool in zip(self.kept, (self.states, self.windows), strict=True):
                kept[number] = pool[last.slot]

    def _call(self, step: _Step, out: torch.Tensor) -> None:
        qkv, g, beta, gate = (x[step.rows] for x in self.memory[:4])
        x = Projections(qkv, g, beta, gate, torch.zeros_like(gate))
        windows = self.windows[:, :, :3]
        given = (self.weights, self.selection, x, windows)
        if step.kind == "prefill":
            assert step.plan is not None
            state = StateRef.pool(self.states, step.slots, step.initial)
            layer.prefill(*given, state, step.plan, self.scratch)
        elif step.kind == "decode":
            layer.decode(*given, StateRef.pool(self.states, step.slots), pdl_prefetch_safe=False)
        else:
            self._verify(step, x)
        first = offsets_of(step.lengths)[step.own]
        length = step.lengths[step.own]
        out[step.begin : step.begin + length] = x.out[first : first + length]

    def _verify(self, step: _Step, x: Projections) -> None:
        table, bounds = step.tables
        draft = DraftInputs.in_pool(torch.ones_like(table[:, 0]), bounds)
        state = StateRef.pool(self.states, table)
        layer.verify(self.weights, self.selection, x, self.windows, state, draft)

    def error(self) -> tuple[float, float]:
        named = {"output": self.out, "state": self.kept[0], "window": self.kept[1]}
        for what, (alone, *others) in named.items():
            for among in others:
                if torch.equal(as_bytes(alone), as_bytes(among)):
                    continue
                differs = (as_bytes(alone) != as_bytes(among)).sum().item()
                raise MismatchError(
                    f"the {what} of a request among others has {differs} other bytes than alone"
                )
        return 0.0, 1.0


def same_bits_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random request of ``kda_backend.layer``."""
    kind = draw.choice("kind", ("prefill", "decode", "verify"))
    request = _Request(kind, draw, target, device)
    return FuzzBatch(request.fill, request.run, request.error)


CASES: Mapping[str, FuzzCase] = {"same_bits": same_bits_case}
