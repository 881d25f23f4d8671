"""What rounding the products of a prediction changes in its plans; on a CPU.

    python -m benchmarks.prediction_products --output benchmarks/results/prediction_products.json

For the synthetic fields of ``token_orders.py``, in tiles of 4 x 4 x 4 tokens, and for independent
normal tokens, whose scores hardly differ: block means are rounded as a form of the scores rounds
them, multiplied in float64, and the largest share of the blocks is kept. ``changed`` is the share
of the kept blocks that are not kept without rounding, ``mass`` the attention kept, ``exact_mass``
that without rounding. Keys are centred on one block, as the form ``centre = "middle"`` does, or on
nothing; ``offset`` is what all keys have in common, over what tells them apart.

"fp16x3" leaves out the product of what the first rounding left, as the kernel does; "bf16" and
"bf16x3" are the same in bf16, which the kernel does not have.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.token_orders import BLOCK, DENSITIES, KINDS, WAVES, D, block_masses, field
from softmax_backend.plan.token_order import tile_order

BOX = (8, 16, 32)
PRODUCTS = ("fp16", "fp16x3", "bf16", "bf16x3")
OFFSETS = (0.0, 10.0)


def product(q: Tensor, k: Tensor, name: str) -> Tensor:
    """q k^T of float32 block means with factors rounded as ``name`` says."""
    kind = torch.float16 if name.startswith("fp16") else torch.bfloat16

    def rounded(x: Tensor) -> Tensor:
        return x.to(kind).to(torch.float32)

    q_high, k_high = rounded(q), rounded(k)
    found = q_high.double() @ k_high.double().mT
    if name.endswith("x3"):
        q_low, k_low = rounded(q - q_high), rounded(k - k_high)
        found = found + q_low.double() @ k_high.double().mT + q_high.double() @ k_low.double().mT
    return found


def keep(scores: Tensor, density: float) -> Tensor:
    """bool like ``scores``: the largest of each row."""
    count = max(1, round(density * scores.shape[-1]))
    at = scores.topk(count, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, at, True)


def measure(q: Tensor, k: Tensor) -> list[dict[str, Any]]:
    """Every product, centre and density of one field [1, H, tokens, D]."""
    mass = block_masses(q, k).double()
    q_mean, k_mean = (x.unflatten(2, (-1, BLOCK)).mean(3) for x in (q, k))
    spread = (k_mean - k_mean.mean(2, keepdim=True)).square().mean().sqrt()
    common = torch.randn(1, 1, 1, D, generator=torch.Generator().manual_seed(1))
    exact = q_mean.double() @ k_mean.double().mT
    rows = []
    for offset, centre, name in itertools.product(OFFSETS, ("middle", "none"), PRODUCTS):
        keys = k_mean + offset * spread * common
        if centre == "middle":
            keys = keys - keys[:, :, keys.shape[2] // 2, None]
        scores = product(q_mean, keys, name)
        for density in DENSITIES:
            got, want = keep(scores, density), keep(exact, density)
            rows.append(
                {
                    "product": name,
                    "centre": centre,
                    "offset": offset,
                    "density": density,
                    "changed": float((got & ~want).sum() / want.sum()),
                    "mass": float((mass * got).sum(-1).mean()),
                    "exact_mass": float((mass * want).sum(-1).mean()),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    order = tile_order(BOX, (4, 4, 4), block=BLOCK, device="cpu").index
    lines = []
    for kind, (waves, wave) in itertools.product(KINDS, WAVES.items()):
        q, k = field(BOX, kind, wave, 2, generator)
        given = {"field": kind, "waves": waves}
        lines += [given | row for row in measure(q[:, :, order], k[:, :, order])]
    q, k = torch.randn(2, 1, 2, len(order), D, generator=generator)
    lines += [{"field": "independent", "waves": "none"} | row for row in measure(q, k)]
    result = {
        "script": "benchmarks/prediction_products.py",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "box": BOX,
        "block": BLOCK,
        "rows": lines,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, centre, offset in itertools.product(PRODUCTS, ("middle", "none"), OFFSETS):
        own = [
            row
            for row in lines
            if (row["product"], row["centre"], row["offset"]) == (name, centre, offset)
        ]
        changed = max(row["changed"] for row in own)
        lost = max(row["exact_mass"] - row["mass"] for row in own)
        print(f"{name:7s} {centre:7s} offset {offset:4.0f}: changed {changed:.1e}, lost {lost:.1e}")


if __name__ == "__main__":
    main()
