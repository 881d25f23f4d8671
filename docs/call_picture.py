"""Write docs/img/life_of_a_call.svg: the eight steps of a call that architecture.md begins with.

    python docs/call_picture.py

A test fails where the picture is not what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.svg import box, picture, text

FILE = Path(__file__).resolve().parent / "img" / "life_of_a_call.svg"
TITLE = (
    "One call in eight steps: what is made once per model, once per step plan, and in each layer"
)

LANES = (
    ("a", "Model", "made at load,", "then frozen"),
    ("b", "Step plan", "made once per step,", "shared by all layers"),
    ("c", "Layer", "addresses are read", "in every call"),
)


class Step(NamedTuple):
    """One step: its lane, its column, its name and two lines about it."""

    lane: int
    column: int
    name: str
    first: str
    second: str


STEPS = (
    Step(0, 0, "1  Load", "the flag's claims take", "layers; seams are held"),
    Step(0, 2, "2  Selection", "rows that can serve, and", "their bound functions"),
    Step(1, 0, "3  Step plan", "offsets, chunks, slots from", "the engine's metadata"),
    Step(2, 0, "4  Call", "adapter to operator, with", "the engine's own tensors"),
    Step(1, 1, "5  Contract", "shapes, dtypes, strides,", "before anything is written"),
    Step(1, 2, "6  Row", "by grid and by the longest", "sequence: the path"),
    Step(1, 3, "7  Prepared", "launches packed, but for", "the layer's addresses"),
    Step(2, 3, "8  Launch", "with this layer's", "addresses: the kernel"),
)
TABLE = Step(0, 3, "Path table", "configs/<family>/", "<vendor>_<arch>.toml")

LABEL, WIDTH, GAP, HEIGHT, LANE = 150, 172, 28, 66, 112


def _left(column: int) -> float:
    return LABEL + column * (WIDTH + GAP)


def _top(lane: int) -> float:
    return lane * LANE + 24


def _middle(step: Step) -> tuple[float, float]:
    return _left(step.column) + WIDTH / 2, _top(step.lane) + HEIGHT / 2


def _drawn(step: Step, kind: str) -> list[str]:
    x, y = _left(step.column), _top(step.lane)
    return [
        box(x, y, WIDTH, HEIGHT, kind),
        text(x + 10, y + 20, step.name, "bold"),
        text(x + 10, y + 39, step.first, "soft"),
        text(x + 10, y + 55, step.second, "soft"),
    ]


def _arrow(*points: tuple[float, float]) -> str:
    moves = " L ".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="arrow" d="M {moves}"/>'


def _arrows() -> list[str]:
    """From the edge of a box to the edge of the next."""
    load, selection, plan, layer, contract, row, prepared, launch = map(_middle, STEPS)
    side, half, tip = WIDTH / 2, HEIGHT / 2, 7

    def right(a: tuple[float, float], b: tuple[float, float]) -> str:
        return _arrow((a[0] + side, a[1]), (b[0] - side - tip, b[1]))

    def down(a: tuple[float, float], b: tuple[float, float], shift: float = 0) -> str:
        return _arrow((a[0] + shift, a[1] + half), (b[0] + shift, b[1] - half - tip))

    table = _middle(TABLE)
    return [
        right(load, selection),
        _arrow((table[0] - side, table[1]), (selection[0] + side + tip, table[1])),
        down(load, plan),
        down(selection, row),
        down(plan, layer),
        _arrow(
            (layer[0] + side, layer[1] - 14),
            (contract[0], layer[1] - 14),
            (contract[0], contract[1] + half + tip),
        ),
        text(contract[0] + 8, layer[1] - 22, "first layer of a layout", "soft"),
        right(contract, row),
        right(row, prepared),
        down(prepared, launch),
        _arrow((layer[0] + side, layer[1] + 14), (launch[0] - side - tip, launch[1] + 14)),
        text(contract[0] + 8, layer[1] + 8, "later layers find it prepared", "soft"),
    ]


def render() -> str:
    """The picture."""
    width = round(_left(3) + WIDTH + 14)
    parts = [
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="1" refY="4" orient="auto"'
        ' markerUnits="userSpaceOnUse"><path class="head" d="M 0 0 L 8 4 L 0 8 Z"/></marker></defs>'
    ]
    for number, (_, name, kept, how) in enumerate(LANES):
        y = number * LANE + 8
        parts += [
            box(6, y, width - 12, LANE - 14, "paper"),
            text(16, y + 34, name, "bold"),
            text(16, y + 53, kept, "soft"),
            text(16, y + 69, how, "soft"),
        ]
    parts += _drawn(TABLE, "paper")
    for step in STEPS:
        parts += _drawn(step, LANES[step.lane][0])
    return picture(width, LANE * len(LANES) + 2, TITLE, parts + _arrows())


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    print(FILE.relative_to(FILE.parents[2]))
