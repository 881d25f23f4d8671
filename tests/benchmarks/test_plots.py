"""The committed pictures: of the committed results, and the same bytes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots


@pytest.mark.parametrize("name", plots.PICTURES)
def test_a_committed_picture_is_of_the_committed_result(name: str, tmp_path: Path) -> None:
    """And every byte, where matplotlib is the one that drew it."""
    drawn = plots.image_of(name).read_text(encoding="utf-8")
    again = f"run python benchmarks/plots.py {name}"
    assert f"drawn from {plots.digest(plots.result_of(name))}" in drawn, again
    matplotlib = pytest.importorskip("matplotlib")
    if f"Matplotlib v{matplotlib.__version__}," in drawn:
        plots.write(name, tmp_path / "again.svg")
        assert (tmp_path / "again.svg").read_text(encoding="utf-8") == drawn, again
