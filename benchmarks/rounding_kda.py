"""Which rounding of chunked KDA costs accuracy: each operand rounded on its own, on a CPU.

    python benchmarks/rounding_kda.py --output benchmarks/results/kda_rounding.json

The chunked form in float64 with named operands rounded to bf16 or fp16, against the recurrence in
float64. One sequence of 513 tokens, 2 heads, K = V = 128; the gate regimes of docs/families/kda.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kda_backend import reference
from kda_backend.testing.regimes import MEASURED_REGIMES, collinear, gate_parameters

CHUNK, HEADS, TOKENS, DIM = 64, 2, 513, 128
# scores: rows and columns of A_qk and L before their product; the others are symbols of
# docs/families/kda.md
OPERANDS = ("scores", "T", "k_in", "w", "u", "q_in", "k_out", "S", "v_new", "A_qk", "o")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Rounding = Mapping[str, str]
Inputs = tuple[torch.Tensor, ...]


def inputs(regime: str, seed: int = 0, lower_bound: float | None = None) -> Inputs:
    """q, k (normalised), v, log decay, beta and state, in float64, drawn as bf16."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).double()

    q, k, v, g = (normal(TOKENS, HEADS, DIM) for _ in range(4))
    beta = normal(TOKENS, HEADS)
    a_log, bias, g = (x.double() for x in gate_parameters(regime, g.float(), generator))
    if regime == "collinear":
        k, beta = collinear(k, beta)
    q, k, v, g, beta = (x.bfloat16().double() for x in (q, k, v, g, beta))
    decay = reference.log_decay(g, a_log, bias, lower_bound)
    state = normal(HEADS, DIM, DIM) * 0.3
    return reference.l2norm(q), reference.l2norm(k), v, decay, beta.sigmoid(), state


def chunked(x: Inputs, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state with the named operands rounded."""

    def at(name: str, y: torch.Tensor) -> torch.Tensor:
        return y.to(DTYPES[rounding[name]]).double() if name in rounding else y

    *tokens, state = x
    outputs = []
    for t0 in range(0, TOKENS, CHUNK):
        q, k, v, g, beta = (y[t0 : t0 + CHUNK].transpose(0, 1) for y in tokens)
        beta, size = beta.unsqueeze(-1), q.shape[1]
        prefix = g.cumsum(1)
        a_qk, a_kk = (torch.zeros(HEADS, size, size).double() for _ in range(2))
        half = 1
        while half < size:
            for middle in range(half, size, 2 * half):
                low, up = slice(middle - half, middle), slice(middle, middle + half)
                anchor = prefix[:, middle - 1 : middle]
                columns = at("scores", k[:, low] * (anchor - prefix[:, low]).exp()).mT
                decay = (prefix[:, up] - anchor).exp()
                a_qk[:, up, low] = at("scores", q[:, up] * decay) @ columns
                a_kk[:, up, low] = at("scores", k[:, up] * decay) @ columns
            half *= 2
        a_qk += torch.diag_embed((q * k).sum(-1))
        eye = torch.eye(size).double()
        low_triangle = eye + beta * a_kk
        inverse = torch.linalg.solve_triangular(low_triangle, eye, upper=False, unitriangular=True)
        inverse = at("T", inverse * beta.mT)
        w = at("w", inverse @ at("k_in", k * prefix.exp()))
        u = at("u", inverse @ v)
        s = at("S", state)
        v_new = at("v_new", u - w @ s.mT)
        q_in = at("q_in", q * prefix.exp())
        k_out = at("k_out", k * (prefix[:, -1:] - prefix).exp())
        o = DIM**-0.5 * (q_in @ s.mT + at("A_qk", a_qk) @ v_new)
        outputs.append(at("o", o).transpose(0, 1))
        state = state * prefix[:, -1].exp().unsqueeze(1) + v_new.mT @ k_out
    return torch.cat(outputs), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    variants: dict[str, Rounding] = {
        "output alone in bf16": {"o": "bf16"},
        "all in bf16": dict.fromkeys(OPERANDS, "bf16"),
        "all in fp16, output bf16": {**dict.fromkeys(OPERANDS, "fp16"), "o": "bf16"},
        **{f"{name} in bf16, output bf16": {name: "bf16", "o": "bf16"} for name in OPERANDS[:-1]},
    }
    errors: dict[str, dict[str, list[float]]] = {}
    for regime in MEASURED_REGIMES:
        x = inputs(regime)
        *tokens, state = x
        want = reference.recurrent_kda(
            *tokens, scale=DIM**-0.5, state=state.unsqueeze(0), cu_seqlens=[0, TOKENS]
        )
        for name, rounding in variants.items():
            got = chunked(x, rounding)
            pairs = ((got[0], want[0]), (got[1], want[1][0]))
            pair = [float((a - b).norm() / b.norm()) for a, b in pairs]
            errors.setdefault(name, {})[regime] = pair
    result = {
        "script": "benchmarks/rounding_kda.py",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "relative_l2_of_output_and_state": errors,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in errors.items():
        print(f"{name:30s}", *(f"{r} {o:.1e}/{s:.1e}" for r, (o, s) in row.items()))


if __name__ == "__main__":
    main()
