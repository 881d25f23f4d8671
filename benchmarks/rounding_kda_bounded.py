"""In which type the scores of a bounded gate are to be made, by emulation on a CPU.

    python benchmarks/rounding_kda_bounded.py \
        --output benchmarks/results/kda_rounding_bounded.json

The Hopper kernels' chunked form in float64 with the roundings of their operands, for gates bounded
by -5, against the recurrence in float64. The scores within 16 tokens are products of q 2^G and
k 2^G with k 2^-G, G the log2 decay from the first of the 16 on; the forms differ in the type of
these three and in how often the rows are rounded that the other products take. One sequence of 513
tokens, 2 heads, K = V = 128.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounding_kda import CHUNK, DIM, HEADS, TOKENS, Inputs, inputs
from kda_backend import reference
from kda_backend.testing.regimes import MEASURED_REGIMES

BOUND, BLOCK = -5.0, 16
BLOCKS = CHUNK // BLOCK
TF32_CUT = 1 + 2.0**-10 / (2 * math.log(2))  # what truncation takes of a product, on average
Tensor = torch.Tensor


def fp16(x: Tensor) -> Tensor:
    return x.half().double()


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def tf32(x: Tensor) -> Tensor:
    """As the tensor cores take an operand: the lower 13 bits of a number of fp32 cut off."""
    return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


def exact_product(rows: Tensor, columns: Tensor) -> Tensor:
    return rows @ columns.mT


def tf32_product(rows: Tensor, columns: Tensor) -> Tensor:
    return tf32(rows) @ tf32(columns).mT * TF32_CUT


def bf16_product(rows: Tensor, columns: Tensor) -> Tensor:
    return bf16(rows) @ bf16(columns).mT


def split_bf16_product(rows: Tensor, columns: Tensor) -> Tensor:
    """Each factor as two numbers of bf16; three products."""
    row, column = bf16(rows), bf16(columns)
    low_row, low_column = bf16(rows - row), bf16(columns - column)
    return row @ column.mT + row @ low_column.mT + low_row @ column.mT


class Form(NamedTuple):
    """``product`` of the scores within 16 tokens; ``direct``: rows are rounded once, decayed, and
    else rows and their decays apart and their product."""

    product: Callable[[Tensor, Tensor], Tensor]
    direct: bool


FORMS = {
    "exact": Form(exact_product, True),
    "tf32, rows rounded three times (centred)": Form(tf32_product, False),
    "tf32, rows rounded once (direct)": Form(tf32_product, True),
    "bf16": Form(bf16_product, True),
    "bf16 in two parts": Form(split_bf16_product, True),
}


class Tile(NamedTuple):
    """A chunk's operands ``[HEADS, 64, ...]`` and its decay ``[HEADS, 1, K]``."""

    q_in: Tensor
    k_in: Tensor
    k_out: Tensor
    a_qk: Tensor
    total: Tensor


def tile_of(form: Form, q: Tensor, k: Tensor, logs: Tensor, beta: Tensor) -> Tile:
    """``q``, ``k`` and log2 decays ``[HEADS, 64, K]``, ``beta [HEADS, 64, 1]``."""
    q, k, logs = (x.reshape(HEADS, BLOCKS, BLOCK, DIM) for x in (q, k, logs))
    sums = logs.cumsum(2)
    totals = sums[:, :, -1:].exp2()
    q_up, k_up, k_down = q * sums.exp2(), k * sums.exp2(), k * (-sums).exp2()
    if form.direct:
        q_prefix, k_prefix, k_suffix = fp16(q_up), fp16(k_up), fp16(totals * k_down)
    else:
        prefix, suffix = fp16(sums.exp2()), fp16(totals * (-sums).exp2())
        q_prefix, k_prefix = fp16(fp16(q) * prefix), fp16(fp16(k) * prefix)
        k_suffix = fp16(fp16(k) * suffix)

    def over(first: int, end: int) -> Tensor:  # the decay over some blocks
        return fp16(totals[:, first:end].prod(1))

    shape = (HEADS, CHUNK, CHUNK)
    a_qk, a_kk = torch.zeros(shape).double(), torch.zeros(shape).double()
    q_in, k_in, k_out = (torch.empty_like(q) for _ in range(3))
    for i in range(BLOCKS):
        rows = slice(BLOCK * i, BLOCK * (i + 1))
        a_qk[:, rows, rows] = form.product(q_up[:, i], k_down[:, i]).tril(-1)
        a_qk[:, rows, rows] += torch.diag_embed((q[:, i] * k[:, i]).sum(-1))
        a_kk[:, rows, rows] = form.product(k_up[:, i], k_down[:, i]).tril(-1)
        for j in range(i):
            columns = slice(BLOCK * j, BLOCK * (j + 1))
            reach = over(j + 1, i)
            a_qk[:, rows, columns] = fp16(q_prefix[:, i] * reach) @ k_suffix[:, j].mT
            a_kk[:, rows, columns] = fp16(k_prefix[:, i] * reach) @ k_suffix[:, j].mT
        q_in[:, i] = fp16(q_prefix[:, i] * over(0, i))
        k_in[:, i] = fp16(k_prefix[:, i] * over(0, i))
        k_out[:, i] = fp16(k_suffix[:, i] * over(i + 1, BLOCKS))
    q_in, k_in, k_out = (x.reshape(HEADS, CHUNK, DIM) for x in (q_in, k_in, k_out))
    a_qk = solved(fp16(a_qk), a_kk, beta)
    return Tile(q_in, k_in, solved(k_out.mT, a_kk, beta).mT, a_qk, totals.prod(1))


def solved(rows: Tensor, a_kk: Tensor, beta: Tensor) -> Tensor:
    """rows T by block backward substitution, as solve.cuh does it; ``rows [HEADS, x, 64]``."""
    eye, y = torch.eye(BLOCK).double(), torch.zeros_like(rows)
    for i in reversed(range(BLOCKS)):
        own = slice(BLOCK * i, BLOCK * (i + 1))
        low = eye + beta[:, own] * a_kk[:, own, own]
        inverse = torch.linalg.solve_triangular(low, eye.expand_as(low), upper=False)
        inverse = fp16(inverse * beta[:, own].mT)
        later = slice(BLOCK * (i + 1), CHUNK)
        x = rows[:, :, own] - y[:, :, later] @ fp16(a_kk[:, later, own])
        y[:, :, own] = fp16(fp16(x) @ inverse)
    return y


def chunked(x: Inputs, form: Form) -> tuple[Tensor, Tensor]:
    """Output and final state."""
    *tokens, state = x
    outputs = []
    for t0 in range(0, TOKENS, CHUNK):
        padding = max(0, t0 + CHUNK - TOKENS)
        q, k, v, g, beta = (
            F.pad(y[t0 : t0 + CHUNK].transpose(0, 1).reshape(HEADS, -1, y[0, 0].numel()),
                  (0, 0, 0, padding))
            for y in tokens
        )  # fmt: skip
        logs = fp16(g * (math.log2(math.e) * 256)) / 256
        tile = tile_of(form, q, k, logs, beta)
        s = fp16(state)
        e = fp16(v - tile.k_in @ s.mT)
        o = DIM**-0.5 * (tile.q_in @ s.mT + tile.a_qk @ e)
        outputs.append(bf16(o)[:, : CHUNK - padding].transpose(0, 1))
        state = state * tile.total + e.mT @ tile.k_out
    return torch.cat(outputs), state


def errors_of(regime: str) -> dict[str, list[float]]:
    """Relative L2 of output and state, by form."""
    x = inputs(regime, lower_bound=BOUND)
    *tokens, state = x
    want = reference.recurrent_kda(
        *tokens, scale=DIM**-0.5, state=state.unsqueeze(0), cu_seqlens=[0, TOKENS]
    )
    found = {}
    for name, form in FORMS.items():
        got = chunked(x, form)
        pairs = ((got[0], want[0]), (got[1], want[1][0]))
        found[name] = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    result = {
        "script": "benchmarks/rounding_kda_bounded.py",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "lower_bound": BOUND,
        "relative_l2_of_output_and_state": {
            regime: errors_of(regime) for regime in MEASURED_REGIMES
        },
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for regime, row in result["relative_l2_of_output_and_state"].items():
        for name, (o, s) in row.items():
            print(f"{regime:12s} {name:42s} {o:.2e} {s:.2e}")


if __name__ == "__main__":
    main()
