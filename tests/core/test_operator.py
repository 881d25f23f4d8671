"""`Operator` and `Selection`: limits, upstream rows, binding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backend_core.operator import Selection, choose
from backend_core.tables.load import PathTable, explain
from backend_core.tables.schema import NoParams, Operator, Row, TableSchema, UpstreamParams
from backend_core.target import KNOWN_TARGETS

TARGET = KNOWN_TARGETS["H200"]
OPERATOR = Operator("prefill", "chunks", {"one": NoParams, "two": NoParams}, "toy.prefill")
ONE = Row("one", "prefill", None, frozenset(), NoParams(), False, "", max_longest=64)
TWO = Row("two", "prefill", None, frozenset({"wide"}), NoParams(), False, "")
UP = Row("upstream", "prefill", 8, frozenset(), UpstreamParams("fa3"), True, "H200, file")


def table(*rows: Row) -> PathTable:
    return PathTable(TableSchema("toy", (OPERATOR,)), None, rows)  # type: ignore[arg-type]


def selection(*rows: Row) -> Selection[str, Any]:
    return Selection(OPERATOR, TARGET, "spec", rows)


def test_the_longest_sequence_is_a_second_limit() -> None:
    rows = (replace(ONE, max_grid=8), replace(TWO, max_grid=8), ONE, TWO)
    chosen = selection(*rows)
    assert chosen.row(8, 64) is rows[0] and chosen.row(8, 65) is rows[1]
    assert chosen.row(8) is rows[1], "the host does not know the lengths"
    assert chosen.row(9, 1) is rows[2] and chosen.row(9, 99) is chosen.row(9) is rows[3]
    bounds = [(row.low, row.high, row.refusal) for row in explain(table(*rows), "prefill")]
    assert bounds == [(1, 8, None), (1, 8, None), (9, None, None), (9, None, None)]


def test_a_range_without_an_open_row_goes_on_in_the_next() -> None:
    rows = (replace(ONE, max_grid=8), ONE, TWO)
    assert selection(*rows).row(3, 65) is TWO


def test_a_row_of_short_sequences_is_not_the_last() -> None:
    found = explain(table(replace(ONE, features=frozenset({"x"})), TWO), "prefill", frozenset("x"))
    refusals = ["no row is left for calls beyond its limits", "lacks x"]
    assert [row.refusal for row in found] == refusals


def test_a_row_of_few_long_sequences() -> None:
    """8 heads of one sequence are 8 times its share, and another of its length makes them 16."""
    long = replace(ONE, max_longest=None, min_longest=4096, max_width=8)
    operator = replace(OPERATOR, unit_tokens=64)
    chosen: Selection[str, Any] = Selection(operator, TARGET, "spec", (long, TWO))
    assert chosen.row(8 * 64, 4096) is long and chosen.row(9 * 64, 4096) is TWO
    assert chosen.row(8 * 64 + 20, 4096) is long, "a short sequence beside it"
    assert chosen.row(8 * 64, 4095) is chosen.row(8 * 64) is TWO
    text = str(explain(table(long, TWO), "prefill")[0])
    assert "a sequence of at least 4096 tokens, at most 8 heads times one such sequence" in text


def test_upstream_takes_part_where_it_can_run_instead() -> None:
    rows = (UP, replace(TWO, max_grid=8), TWO)
    alone = explain(table(*rows), "prefill")
    assert alone[0].refusal == "only where fa3 can run instead"
    beside = explain(table(*rows), "prefill", upstream="fa3")
    assert [row.refusal for row in beside] == [
        None,
        "upstream is preferred for the same grids",
        None,
    ]
    chosen = selection(UP, TWO)
    assert chosen.sizes == ((9, None),) and selection(TWO).sizes == ((1, None),)
    with pytest.raises(LookupError, match=r"prefill of this size is left to fa3 \(H200, file\)"):
        chosen.run(8)


def test_the_sizes_that_are_not_left_to_upstream() -> None:
    again = replace(UP, max_grid=None)
    rows = (replace(TWO, max_grid=4), UP, replace(ONE, max_grid=14, max_longest=None))
    rows += (replace(TWO, max_grid=16), again)

    def sizes(*rows: Row, upstream: str | None = "fa3") -> object:
        return choose(table(*rows), "prefill", TARGET, "spec", upstream=upstream).sizes

    assert sizes(*rows) == ((1, 4), (9, 16))
    assert sizes(again) == ()
    assert sizes(*rows[:4]) == ((1, 4), (9, None))
    assert sizes(*rows, upstream="fa4") == ((1, None),)


def test_functions_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []

    def bind(self: Operator, row: Row, spec: object, target: object) -> Any:
        bound.append((row.name, spec))
        return lambda: row.name

    monkeypatch.setattr(Operator, "bind", bind)
    chosen = selection(UP, TWO)
    assert chosen.run(9)() == "two" and chosen.run(99)() == "two" and len(chosen.bind_all()) == 1
    other = chosen.for_spec("other")
    assert other is chosen.for_spec("other") and chosen.for_spec("spec") is chosen
    assert other.run(9)() == "two" and bound == [("two", "spec"), ("two", "other")]
