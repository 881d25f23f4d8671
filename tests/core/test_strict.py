from __future__ import annotations

import logging

import pytest

from backend_core import strict
from backend_core.strict import FallbackError, choice, fallback, strict_mode


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[(None, False), ("", False), ("0", False)],
        *[("false", False), ("No", False), ("off", False)],
        *[("1", True), ("true", True), ("2", True)],
    ],
)
def test_strict_mode_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv("KDA_DSV4_STRICT", raising=False)
    if value is not None:
        monkeypatch.setenv("KDA_DSV4_STRICT", value)
    assert strict_mode() is expected


def test_a_choice_is_on_off_or_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("", "0", "Off", "1", "true"):
        monkeypatch.setenv("KDA_DSV4_TEST", value)
        found.append(choice("KDA_DSV4_TEST"))
    assert found == [None, False, False, True, True]
    monkeypatch.delenv("KDA_DSV4_TEST")
    assert choice("KDA_DSV4_TEST") is None
    monkeypatch.setenv("KDA_DSV4_TEST", "states")
    with pytest.raises(ValueError, match="KDA_DSV4_TEST must be 0 or 1, got 'states'"):
        choice("KDA_DSV4_TEST")


def test_each_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strict, "_reported", set())
    monkeypatch.delenv("KDA_DSV4_STRICT", raising=False)
    with caplog.at_level(logging.WARNING, logger="kda_dsv4"):
        for reason in ("no table for sm75", "no table for sm75", "lacks snapshots"):
            fallback(reason)
    assert [record.getMessage() for record in caplog.records] == [
        "falling back to upstream's code: no table for sm75",
        "falling back to upstream's code: lacks snapshots",
    ]


def test_strict_mode_raises_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    for _ in range(2):
        with pytest.raises(FallbackError, match="to upstream's code: no table"):
            fallback("no table")
