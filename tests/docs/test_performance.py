from __future__ import annotations

from docs import performance


def test_the_page_is_what_the_files_say() -> None:
    assert performance.PAGE.read_text(encoding="utf-8") == performance.render(), (
        "run python docs/performance.py"
    )
