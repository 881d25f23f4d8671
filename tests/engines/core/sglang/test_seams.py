"""The lists of what is relied on, in sglang's wheel."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.engines import releases

VERSION = version("sglang")
NEWEST = pytest.mark.skipif(VERSION != "0.5.23", reason="about the newest release")
NOT_SERVED = {
    "0.5.22": {"compressors of DeepSeek-V4.1", "attention of DeepSeek-V4"},
    "0.5.23": set(),
}


def test_what_is_relied_on_is_there() -> None:
    assert releases.differing("sglang") == NOT_SERVED[VERSION]
    assert releases.found("sglang") == releases.recorded("sglang", VERSION)


def test_holding_imports_nothing() -> None:
    assert releases.imported_by_holding("sglang") == set()


@NEWEST
def test_a_release_that_does_not_exist_yet_is_served(tmp_path: Path) -> None:
    code, out = releases.seams_of_wheel("sglang", "0.5.24", tmp_path)
    (title,) = out.splitlines()
    assert code == 0 and title.startswith("sglang 0.5.24, not tested: ")
    assert title.endswith(" hold, 0 changed, 0 differ")
