"""Which releases have a recipe, and which of them CI runs on a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_core.engines import ENGINES, flag_name
from tests.engines.envs import LONG, load_recipes, places_of, releases_of_the_day

RECIPES = load_recipes()


def of(engine: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(f"{engine}==")]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_oldest_and_the_newest_release_are_run_every_day(engine: str) -> None:
    first, last = (
        f"{engine}=={release}" for release in (ENGINES[engine].first, ENGINES[engine].last)
    )
    releases = of(engine, list(RECIPES))
    assert releases[0] == first and releases[-1] == last
    for day in range(20):
        chosen = releases_of_the_day(RECIPES, day)
        assert len(chosen) == 5 and {first, last} <= set(chosen)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_other_release_comes_up_within_a_week(engine: str) -> None:
    week = {name for day in range(100, 107) for name in releases_of_the_day(RECIPES, day)}
    assert set(of(engine, list(RECIPES))) <= week


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_claimed_release_is_left_out(engine: str) -> None:
    """Releases are numbered without a gap."""
    numbers = [name.split("==")[1] for name in of(engine, list(RECIPES))]
    place = 1 if engine == "vllm" else 2
    counts = [int(number.split(".")[place]) for number in numbers]
    assert counts == list(range(counts[0], counts[-1] + 1))
    assert all(ENGINES[engine].supports(number) for number in numbers)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_familys_tests_are_run(engine: str) -> None:
    written = {file.parent for file in Path(__file__).parent.glob(f"**/{engine}/test_*.py")}
    places = places_of(f"{engine}==0.0.0")
    assert len(places) == len(written) and set(places) == written
    assert set(LONG) <= {place.parent.name for place in places}


def test_a_recipe_is_complete_where_it_takes_another_ones_packages() -> None:
    for name, recipe in RECIPES.items():
        assert len(recipe["packages"]) > 40, name
        assert all("==" in package for package in recipe["packages"])
        assert (recipe.get("ci") == "always") == (
            name.split("==")[1] in ("0.30.0", "0.33.0", "0.5.20", "0.5.23")
        )


@pytest.mark.parametrize(
    ("engine", "version", "name"),
    [
        ("vllm", "0.30.0", "CUSTOM"),
        ("vllm", "0.31.0+cu130", "CUSTOM"),
        ("vllm", "0.32.0", "KDA"),
        ("vllm", "0.33.0rc1", "KDA"),
        ("sglang", "0.5.20", "kda"),
    ],
)
def test_the_flags_name_follows_the_release(engine: str, version: str, name: str) -> None:
    assert flag_name(engine, "kda", version) == name


def test_an_engine_without_the_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="engine must be vllm or sglang, got transformers"):
        flag_name("transformers", "kda")
