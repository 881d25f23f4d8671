"""``kda-dsv4 plot``: a result of the benchmarks as bars and growth curves."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend_cli.errors import BadInputError, CliError
from backend_cli.files import check_writable, write_bytes
from backend_cli.results import (
    Row,
    group,
    is_growth,
    name,
    read_result,
    shape,
    size,
    size_unit,
    times,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
KINDS = ("bars", "growth", "both")
_COLOURS = {"ours": "#1f5a94", "two_stage": "#8fb3d9", "bare": "#8fb3d9"}
_PEER_COLOURS = ("#8c8c8c", "#c9a227", "#b5574a", "#6a8f5a", "#7a5c99")


def plot(
    result: Annotated[
        Path, typer.Argument(metavar="RESULT.json", help="A result of kda-dsv4 bench.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The picture, .png or .svg; RESULT.svg by default."),
    ] = None,
    kind: Annotated[str, typer.Option(help=f"What to draw: {', '.join(KINDS)}.")] = "both",
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Draw only these rows, such as H=32. Repeatable."),
    ] = None,
) -> None:
    """Draw a benchmark result as bars for each shape, and as time against size."""
    path = output or Path(f"{result.stem}.svg")
    if path.suffix not in FORMATS:
        raise BadInputError(f"--output must end in .png or .svg, got {path.name}")
    if kind not in KINDS:
        raise BadInputError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    check_writable(path)
    found = read_result(result)
    rows = choose(found["rows"], where or [])
    for row in rows:
        try:
            group(row), shape(row), size(row)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadInputError(f"result {result} has a row without its shape: {error}") from error
    if importlib.util.find_spec("matplotlib") is None:
        raise CliError("plot needs matplotlib: pip install '.[bench]' in the clone")
    figure = draw(found, rows, kind)
    drawn = io.BytesIO()
    # the same result gives the same file
    dated = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(drawn, format=path.suffix[1:], metadata=dated, dpi=150)
    write_bytes(path, drawn.getvalue())
    print(path)


def choose(rows: list[Row], where: list[str]) -> list[Row]:
    """The rows that have every ``key=value``.

    Raises:
        BadInputError: a filter is not of that form, or no row is left.
    """
    for item in where:
        key, equals, value = item.partition("=")
        if not equals:
            raise BadInputError(f"--where must be KEY=VALUE, got {item!r}")
        kept = [row for row in rows if str(row.get(key)) == value]
        if not kept:
            values = sorted({str(row[key]) for row in rows if key in row})
            raise BadInputError(
                f"no row has {item}; {key} is {', '.join(values) if values else 'in no row'}"
            )
        rows = kept
    return rows


def draw(result: dict[str, Any], rows: list[Row], kind: str) -> Figure:
    """One line of panels a group: its bars, and its growth curve if it has one."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "kda", "font.family": "sans-serif"}
    )
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(row)
    contenders = list(dict.fromkeys(c for row in rows for c in times(row)))
    peers = [c for c in contenders if c not in _COLOURS]
    colours = _COLOURS | dict(zip(peers, _PEER_COLOURS * len(peers), strict=False))
    columns = 2 if kind == "both" else 1
    figure, panels = plt.subplots(
        len(groups), columns, figsize=(6.4 * columns, 2.6 * len(groups) + 1.0), squeeze=False
    )
    for line, (title, members) in zip(panels, groups.items(), strict=True):
        if kind != "growth":
            _bars(line[0], members, contenders, colours)
            line[0].set_title(title, fontsize=9, loc="left")
        curve = [row for row in members if is_growth(row)]
        if kind != "bars" and len(curve) > 1:
            _growth(line[-1], curve, contenders, colours)
            line[-1].set_title(f"{title}: growth", fontsize=9, loc="left")
        elif kind != "bars":
            line[-1].set_axis_off()
    height = figure.get_figheight()
    figure.suptitle(
        f"GPU time in ms (lower is better): {result.get('gpu')}", fontsize=10, y=1 - 0.1 / height
    )
    handles = [Patch(color=colours[c]) for c in contenders]
    figure.legend(
        handles, [name(c) for c in contenders], loc="lower center", ncols=4, frameon=False,
        fontsize=8,
    )  # fmt: skip
    versions = f"torch {result.get('torch')}, Triton {result.get('triton')}, {result.get('date')}"
    figure.text(0.995, 0.002, versions, ha="right", fontsize=6, color="#707070")
    figure.tight_layout(rect=(0, 0.35 / height, 1, 1 - 0.2 / height))
    return figure


def _bars(panel: Axes, rows: list[Row], contenders: list[str], colours: dict[str, str]) -> None:
    """Heights relative to ours, since times differ by a factor of a hundred; labels in ms."""
    width = 0.8 / len(contenders)
    for place, contender in enumerate(contenders):
        points = [(i, row) for i, row in enumerate(rows) if contender in times(row)]
        drawn = panel.bar(
            [i + (place + 0.5) * width - 0.4 for i, _ in points],
            [times(row)[contender] / times(row)["ours"] for _, row in points],
            width,
            color=colours[contender],
        )
        labels = [f"{times(row)[contender]:.3g}" for _, row in points]
        if len(rows) * len(contenders) <= 32:
            panel.bar_label(drawn, labels, fontsize=5, padding=1)
    panel.set_ylabel("relative to this backend", fontsize=7)
    panel.set_xticks(range(len(rows)), [shape(row) for row in rows], fontsize=6, rotation=20)
    panel.set_xlim(-0.6, max(len(rows), 3) - 0.4)
    panel.tick_params(axis="y", labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def _growth(panel: Axes, rows: list[Row], contenders: list[str], colours: dict[str, str]) -> None:
    from matplotlib.ticker import NullFormatter

    for contender in contenders:
        points = sorted(
            (size(row), times(row)[contender]) for row in rows if contender in times(row)
        )
        if points:
            sizes, ms = zip(*points, strict=True)
            panel.plot(sizes, ms, marker="o", markersize=3, color=colours[contender])
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    panel.set_ylabel("ms", fontsize=7)
    panel.set_xlabel(size_unit(rows[0]), fontsize=7)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
