"""What segments cost KDA's Hopper prefill in accuracy: its roundings emulated on a CPU.

    python benchmarks/rounding_kda_segments.py --output FILE

The scan of kernels/sm90 with its fp16 operands and fp32 state, on tiles that are exact before they
are rounded to fp16: whole, and by segments of so many chunks, whose transitions and ends are formed
and applied as segment_ends.cu and merge_segments.cu do it. Against the chunked form in float64. One
sequence of 8,192 tokens, 2 heads, K = V = 128; the gate regimes of docs/families/kda.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kda_backend import reference
from kda_backend.testing.cases import make_case
from kda_backend.testing.regimes import MEASURED_REGIMES

CHUNK, HEADS, CHUNKS, DIM = 64, 2, 128, 128
SEGMENTS = (0, 1, 4, 16, 32)  # chunks of a segment; 0: whole
Tiles = dict[str, torch.Tensor]


def half(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).double()


def single(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).double()


def tiles_of(x: tuple[torch.Tensor, ...]) -> Tiles:
    """[chunks, heads, ...]: k_in, q_in, T^T k_out, A_qk T and v rounded to fp16, decays to fp32."""
    q, k, v, g, beta = (y.unflatten(0, (CHUNKS, CHUNK)).transpose(1, 2) for y in x)
    prefix, beta = g.cumsum(-2), beta.unsqueeze(-1)
    a_qk, a_kk = reference._scores(q, k, g)
    eye = torch.eye(CHUNK, dtype=q.dtype)
    t = torch.linalg.solve_triangular(eye + beta * a_kk.tril(-1), eye, upper=False) * beta.mT
    after = reference._sum_after(g)
    return {
        "k_in": half(k * prefix.exp()),
        "q_in": half(q * prefix.exp()),
        "keys": half(t.mT @ (k * after.exp())),
        "scores": half(a_qk @ t),
        "v": v,
        "decay": single(prefix[..., -1, :].exp()),
    }


def scan(
    tiles: Tiles, chunks: range, state: torch.Tensor, *, values: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [chunks, heads, 64, V] and the state after them; without values, of rows that have
    none."""
    outputs = []
    for c in chunks:
        operand = half(state)
        e = -tiles["k_in"][c] @ operand.mT
        if values:
            e = e + tiles["v"][c]
        e = half(single(e))
        o = DIM**-0.5 * (tiles["q_in"][c] @ operand.mT + tiles["scores"][c] @ e)
        outputs.append(o.bfloat16().double())
        state = single(state * tiles["decay"][c].unsqueeze(-2) + e.mT @ tiles["keys"][c])
    return torch.stack(outputs), state


def by_segments(tiles: Tiles, size: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by segments of ``size`` chunks."""
    segments = [range(c, min(c + size, CHUNKS)) for c in range(0, CHUNKS, size)]
    start, outputs = state, []
    for i, chunks in enumerate(segments):
        o, after = scan(tiles, chunks, start)
        outputs.append(o)
        if i == 0:
            start = after
        elif i + 1 < len(segments):
            eye = torch.eye(DIM).double().expand(HEADS, DIM, DIM)
            _, a = scan(tiles, chunks, eye, values=False)
            _, b = scan(tiles, chunks, torch.zeros_like(state))
            decay = torch.ones(HEADS, DIM).double()
            for c in chunks:
                decay = single(decay * tiles["decay"][c])
            rest = half(single(a - torch.diag_embed(decay)))
            start = single(single(start * decay.unsqueeze(-2) + b) + half(start) @ rest)
    return torch.cat(outputs), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    errors: dict[str, dict[str, list[float]]] = {}
    for regime in MEASURED_REGIMES:
        case = make_case(
            1, (CHUNKS * CHUNK,), regime=regime, heads=HEADS, key_dim=DIM, value_dim=DIM
        )
        x, first = case.activated(), case.state.double()
        want_o, want_s, _ = reference.chunk_kda(
            *x, scale=DIM**-0.5, state=first, cu_seqlens=case.offsets
        )
        tiles = tiles_of(x)
        for size in SEGMENTS:
            run = by_segments(tiles, size or CHUNKS, first[0])
            o, s = run[0].transpose(1, 2).flatten(0, 1), run[1]
            pairs = ((o, want_o), (s, want_s[0]))
            name = f"segments of {size} chunks" if size else "whole"
            errors.setdefault(name, {})[regime] = [
                float((got - want).norm() / want.norm()) for got, want in pairs
            ]
    result = {
        "script": "benchmarks/rounding_kda_segments.py",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "relative_l2_of_output_and_state": errors,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in errors.items():
        print(f"{name:24s}", *(f"{r} {o:.2e}/{s:.2e}" for r, (o, s) in row.items()))


if __name__ == "__main__":
    main()
