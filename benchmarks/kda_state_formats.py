"""Errors of KDA states in fp32, bf16 and fp16 memory over a long answer, against float64.

    python benchmarks/kda_state_formats.py --output benchmarks/results/kda_state_formats_h200.json

Two requests of two heads for each gate regime advance by 16,384 tokens: by decode steps alone, with
fp32 tokens so that nothing but the state is rounded to 16 bits; and by prefills of 192 tokens with
64 decode steps after each, with the engines' bf16 tokens, whose outputs are rounded too. Tokens are
the same for all formats. After all ``steps`` a row has relative L2 errors of one regime:
``output_error`` of the last 1,024 tokens' outputs, ``state_error`` of the states.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.target import detect_target
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment
from kda_backend import (
    GateSpec,
    StateRef,
    TokenInputs,
    kda_decode_step,
    kda_prefill,
    reference,
)
from kda_backend.selection import KdaShape, select
from kda_backend.testing.regimes import MEASURED_REGIMES, gate_parameters

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOW = "decay 1e-3"
"""A decay of e^-0.001 in every channel and token, beside the regimes of the accuracy tables."""
REGIMES = (*MEASURED_REGIMES, SLOW)
REQUESTS, HEADS_OF_A_REGIME, DIM = 2, 2, 128
HEADS = len(REGIMES) * HEADS_OF_A_REGIME
BLOCK, PREFILLED = 256, 192  # tokens drawn at once, and those of a prefill
LAST = 1024  # tokens of ``output_error``
CALLS = {"decode": torch.float32, "prefill and decode": torch.bfloat16}


class Model(NamedTuple):
    """``HEADS`` heads, those of a regime after one another; A_log ``[HV]``, dt_bias ``[HV, K]``."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor
    collinear_keys: torch.Tensor


class Block(NamedTuple):
    """bf16 tokens ``[N, BLOCK, HV, 128]``; beta ``[N, BLOCK, HV]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def own(regime: str) -> slice:
    """The heads of a regime."""
    first = REGIMES.index(regime) * HEADS_OF_A_REGIME
    return slice(first, first + HEADS_OF_A_REGIME)


def draw(rng: torch.Generator) -> tuple[Model, Callable[[], Block]]:
    """A model, and a function that draws its next tokens."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=rng.device)

    a_log, dt_bias = normal(HEADS), normal(HEADS, DIM)
    for regime in REGIMES:
        heads = own(regime)
        if regime == SLOW:
            a_log[heads], dt_bias[heads] = 0.0, math.log(math.expm1(1e-3))
        else:
            raw = normal(1, HEADS_OF_A_REGIME, DIM)
            a_log[heads], dt_bias[heads], _ = gate_parameters(regime, raw, rng)
    model = Model(a_log, dt_bias, normal(REQUESTS, 1, HEADS_OF_A_REGIME, DIM))
    spreads = {"init": 0.3, "weak": 0.3, "long": 3.0, SLOW: 0.0}

    def block() -> Block:
        q, k, v, g = (normal(REQUESTS, BLOCK, HEADS, DIM) for _ in range(4))
        beta = normal(REQUESTS, BLOCK, HEADS)
        for regime, spread in spreads.items():
            g[:, :, own(regime)] *= spread
        heads = own("collinear")
        k[:, :, heads] = model.collinear_keys + 0.01 * k[:, :, heads]
        beta[:, :, heads] += 6.0
        return Block(*(x.bfloat16() for x in (q, k, v, g, beta)))

    return model, block


def gate_of(model: Model) -> GateSpec:
    return GateSpec.of(model.a_log, model.dt_bias, None)


class Reference:
    """The definition in float64."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.states = torch.zeros(REQUESTS, HEADS, DIM, DIM, dtype=torch.float64)
        self.states = self.states.to(model.a_log.device)

    def advance(self, x: Block) -> torch.Tensor:
        """The outputs ``[N, BLOCK, HV, V]`` of some tokens."""
        q, k, v, g, beta = (tensor.double().flatten(0, 1) for tensor in x)
        o, self.states, _ = reference.chunk_kda(
            reference.l2norm(q),
            reference.l2norm(k),
            v,
            reference.log_decay(g, self._model.a_log, self._model.dt_bias, None),
            beta.sigmoid(),
            scale=DIM**-0.5,
            state=self.states,
            cu_seqlens=[n * BLOCK for n in range(REQUESTS + 1)],
        )
        return o.unflatten(0, (REQUESTS, BLOCK))


class Kernels:
    """The operators on a pool of one format."""

    def __init__(self, model: Model, state: torch.dtype, tokens: torch.dtype) -> None:
        device = model.a_log.device
        self._gate = gate_of(model)
        target = detect_target(device)
        shape = KdaShape(HEADS, HEADS, DIM, DIM, dtype=tokens, gate_dtype=tokens)
        self._selection = select(target, shape)
        self._pool = torch.zeros(REQUESTS, HEADS, DIM, DIM, dtype=state, device=device)
        indices = torch.arange(REQUESTS, dtype=torch.int32, device=device)
        self._state = StateRef.pool(self._pool, indices)

    @property
    def states(self) -> torch.Tensor:
        return self._pool.double()

    def advance(self, x: Block, prefilled: int) -> torch.Tensor:
        """The outputs of some tokens, the first ``prefilled`` by a prefill."""
        dtype = self._selection.shape.dtype
        x = Block(*(tensor.to(dtype) for tensor in x))
        out = torch.empty_like(x.v)
        if prefilled:
            first = TokenInputs.of(*(tensor[:, :prefilled].contiguous() for tensor in x))
            result = kda_prefill(first, self._gate, self._state, selection=self._selection)
            out[:, :prefilled] = result.out
        for t in range(prefilled, BLOCK):
            kda_decode_step(
                TokenInputs.of(*(tensor[:, t] for tensor in x)),
                self._gate,
                self._state,
                out=out[:, t],
                selection=self._selection,
            )
        return out.double()


def measure(device: torch.device, calls: str, steps: int) -> Iterator[dict[str, Any]]:
    """The rows of one way to advance."""
    model, next_block = draw(torch.Generator(device).manual_seed(1))
    exact = Reference(model)
    formats = {name: Kernels(model, state, CALLS[calls]) for name, state in FORMATS.items()}
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in formats}
    wanted: list[torch.Tensor] = []  # [HV] squares of outputs, of a block each
    prefilled = 0 if calls == "decode" else PREFILLED
    for _ in range(0, steps, BLOCK):
        x = next_block()
        want = exact.advance(x)
        wanted = [*wanted, want.square().sum((0, 1, 3))][-LAST // BLOCK :]
        for name, kernels in formats.items():
            error = (kernels.advance(x, prefilled) - want).square().sum((0, 1, 3))
            kept[name] = [*kept[name], error][-LAST // BLOCK :]
    for regime in REGIMES:
        heads = own(regime)
        outputs = sum(wanted)[heads].sum()  # type: ignore[index]
        states = exact.states[:, heads]
        for name, kernels in formats.items():
            error = sum(kept[name])[heads].sum()  # type: ignore[index]
            of_states = (kernels.states[:, heads] - states).square().sum()
            yield {
                "calls": calls,
                "regime": regime,
                "format": name,
                "steps": steps,
                "output_error": float((error / outputs).sqrt()),
                "state_error": float((of_states / states.square().sum()).sqrt()),
            }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--steps", type=int, default=16384, help="a multiple of 256")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = (environment() if device.type == "cuda" else {}) | {"rows": []}
    for calls in CALLS:
        for row in measure(device, calls, args.steps):
            result["rows"].append(row)
            print(" ".join(f"{x:.2e}" if isinstance(x, float) else str(x) for x in row.values()))
    if args.output:
        write_record(args.output, result)


if __name__ == "__main__":
    main()
