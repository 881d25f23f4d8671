"""How the order of a video's tokens changes what blocks of attention can leave out; on a CPU.

    python -m benchmarks.token_orders --output benchmarks/results/token_orders.json

Fields of queries and keys over a box of tokens (time, height, width) are put into raster order,
into tiles of two shapes, each of one block, and along the Hilbert curve. For each order: the share
of the attention that a prediction keeps at a given density, the most that any choice of as many
blocks would keep, and the density that the best choice needs for nine tenths of the attention. A
random order is the control.

Two kinds of smooth random field are made, each of short and of long waves:

- ``place``: queries and keys are the same function of the place, random waves in every channel, so
  a token attends its surroundings;
- ``content``: queries and keys are functions of eight smooth values, so a token attends whatever
  resembles it, wherever it lies.

They are no video: what an order does for a model's own queries and keys, ``recall`` says.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softmax_backend.plan.predicted import predict, recall
from softmax_backend.plan.token_order import Box, hilbert_order, tile_order

D = 64
BLOCK = 64
WAVES = {"short": 2.0, "long": 6.0}
"""Reciprocal of the standard deviation of a wave's angular frequency, in tokens along any axis."""
KINDS = {"place": 9.0, "content": 6.0}
"""The mean logit of a token with itself; with an unlike one it is 0."""
DENSITIES = (0.0625, 0.125, 0.25)
MASS = 0.9
TILES: tuple[Box, ...] = ((4, 4, 4), (2, 4, 8))


def field(
    box: Box, kind: str, wave: float, heads: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Queries and keys, float32 [1, heads, tokens, D], in raster order."""
    axes = [torch.arange(side, dtype=torch.float32) for side in box]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, 3)

    def waves(count: int) -> Tensor:
        """[tokens, count] of unit variance."""
        frequency = torch.randn(3, count, generator=generator) / wave
        phase = 2 * math.pi * torch.rand(count, generator=generator)
        return math.sqrt(2.0) * torch.cos(place @ frequency + phase)

    def head() -> tuple[Tensor, Tensor]:
        if kind == "place":
            common = waves(D)
        else:
            mix = torch.randn(8, D, generator=generator) / math.sqrt(8.0)
            common = waves(8) @ mix
        noise = torch.randn(2, *common.shape, generator=generator)
        size = math.sqrt(KINDS[kind] / math.sqrt(D))
        q, k = size * (common + 0.3 * noise)
        return q, k

    pairs = [head() for _ in range(heads)]
    return tuple(torch.stack(x)[None] for x in zip(*pairs, strict=True))  # type: ignore[return-value]


def orders(box: Box, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens in each order: int64 [tokens].

    Raises:
        ValueError: the tiles do not fill the box.
    """
    tokens = math.prod(box)
    found = {"raster": torch.arange(tokens)}
    for tile in TILES:
        name = "tiles of " + " x ".join(map(str, tile))
        found[name] = tile_order(box, tile, block=BLOCK, device="cpu").index
        if len(found[name]) != tokens:
            raise ValueError(f"a box must be filled by {name} tokens, got {box}")
    found["hilbert"] = hilbert_order(box, "cpu")[0]
    return found | {"random": torch.randperm(tokens, generator=generator)}


def block_masses(q: Tensor, k: Tensor) -> Tensor:
    """The attention of each tile of queries to each block of keys, its rows summing to 1."""
    p = torch.softmax(D**-0.5 * (q @ k.mT), -1)
    tokens = p.shape[-1]
    return p.view(*p.shape[:2], tokens // BLOCK, BLOCK, -1, BLOCK).sum(-1).mean(3)


def measure(q: Tensor, k: Tensor) -> dict[str, Any]:
    """One order of one field."""
    mass = block_masses(q, k).sort(-1, descending=True).values.cumsum(-1)
    blocks = mass.shape[-1]
    needed = ((mass < MASS).sum(-1) + 1).float().mean() / blocks
    rows = []
    for density in DENSITIES:
        count = max(1, math.ceil(density * blocks))
        plan = predict(q, k, topk=density, block_m=BLOCK, block_n=BLOCK, path="torch")
        rows.append(
            {
                "density": plan.density(),
                "predicted": float(recall(plan, q, k).mean()),
                "best": float(mass[..., count - 1].mean()),
            }
        )
    return {"kept": rows, f"density_for_{MASS}": float(needed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--box", type=int, nargs=3, default=(8, 16, 32))
    parser.add_argument("--heads", type=int, default=2)
    options = parser.parse_args()
    box = tuple(options.box)
    generator = torch.Generator().manual_seed(0)
    lines = []
    for kind, (name, wave) in itertools.product(KINDS, WAVES.items()):
        q, k = field(box, kind, wave, options.heads, generator)
        for order, at in orders(box, generator).items():
            line = {"field": kind, "waves": name, "order": order}
            lines.append(line | measure(q[:, :, at], k[:, :, at]))
            print(json.dumps(lines[-1]), flush=True)
    result = {
        "script": "benchmarks/token_orders.py",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "box": box,
        "block": BLOCK,
        "heads": options.heads,
        "mass": MASS,
        "rows": lines,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
