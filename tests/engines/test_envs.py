"""Which releases have a recipe, and which of them CI runs on a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_cli.serve import SERVERS
from backend_core.engines import ENGINES
from tests.engines.envs import LONG, folders_of_the_day, load_recipes, places_of

RECIPES = load_recipes()
FLA = "fla-core==0.6.0"


def test_the_tested_releases_have_a_recipe_and_the_newest_are_run_every_day() -> None:
    said = [f"{name}=={version}" for name in SERVERS for version in ENGINES[name].tested]
    assert list(RECIPES) == [*said, FLA]
    newest = {f"{name}=={ENGINES[name].tested[-1]}" for name in SERVERS}
    days = [folders_of_the_day(RECIPES, day) for day in range(100, 108)]
    assert all(len(day) == 4 and {*newest, FLA} <= set(day) for day in days)
    assert all(day[name] == places_of(name) for day in days for name in (*newest, FLA))
    for name in RECIPES:  # an older release has its tests of seams each time, and one family's
        places = [day[name] for day in days if name in day]
        assert {place for day in places for place in day} == set(places_of(name))
        assert all("core" in {place.parent.name for place in day} for day in places) or name == FLA


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_familys_tests_are_run(engine: str) -> None:
    written = {file.parent for file in Path(__file__).parent.glob(f"**/{engine}/test_*.py")}
    places = places_of(f"{engine}==0.0.0")
    assert len(places) == len(written) and set(places) == written
    assert set(LONG) <= {place.parent.name for place in places}


def test_a_recipe_is_complete_where_it_takes_another_ones_packages() -> None:
    for name, recipe in RECIPES.items():
        assert len(recipe["packages"]) > 40 or name == FLA
        assert all("==" in package for package in recipe["packages"])
