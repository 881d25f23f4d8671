"""Path tables: typed rows, refusals that name file and row, and the selection by grid."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from backend_core import strict
from backend_core.operator import choose, forced
from backend_core.tables import load as path_table
from backend_core.tables.load import (
    PathTable,
    explain,
    feature_sets,
    load_table,
    unmeasured,
)
from backend_core.tables.schema import NoParams, Operator, TableSchema
from backend_core.target import KNOWN_TARGETS, Target

H200 = KNOWN_TARGETS["H200"]


@dataclass(frozen=True)
class TileParams:
    block_v: int
    tma: bool
    precision: Literal["ieee", "tf32"]
    num_stages: int = 2

    def __post_init__(self) -> None:
        if self.block_v % 16:
            raise ValueError(f"block_v must be a multiple of 16, got {self.block_v}")


PREFILL_PATHS = ("two_stage", "small", "middle", "a", "b", "c", "d", "ours", "vendor")
TOY = TableSchema(
    "toy",
    (
        Operator(
            "prefill",
            "chunks",
            {name: NoParams for name in PREFILL_PATHS} | {"fused": TileParams},
            requires=lambda features: features,
            features=dict.fromkeys((*PREFILL_PATHS, "fused"), "varlen snapshots state_pool x y"),
        ),
        Operator("decode", "sequences", {"recurrent": NoParams}),
    ),
)


def row(operator: str = "prefill", name: str = "two_stage", **keys: object) -> str:
    """One [[path]]; a key of None is left out."""
    entry: dict[str, object] = {
        "operator": operator,
        "name": name,
        "features": [],
        "source": "offline compilation",
        **keys,
    }
    params = entry.pop("params", None)
    lines = [f"{key} = {_toml(value)}" for key, value in entry.items() if value is not None]
    if isinstance(params, dict):
        lines += ["[path.params]", *(f"{key} = {_toml(value)}" for key, value in params.items())]
    return "\n".join(["[[path]]", *lines, ""])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)


DECODE = row("decode", "recurrent")
TILE = {"block_v": 32, "tma": True, "precision": "ieee"}


def fused(**params: object) -> str:
    """A row with the parameters of `TILE`, changed; ``None`` leaves one out."""
    changed = {key: value for key, value in (TILE | params).items() if value is not None}
    return row(name="fused", params=changed)


def load(directory: Path, text: str, target: Target = H200) -> PathTable:
    file = directory / "toy" / f"{target.key}.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return load_table(TOY, target, directory=directory)


def three_ranges(directory: Path) -> PathTable:
    return load(
        directory,
        row(name="small", max_grid=10, features=["varlen"])
        + row(name="middle", max_grid=100, features=["varlen", "snapshots"])
        + row(name="fused", features=["varlen"], params=TILE)
        + DECODE,
    )


def test_a_row_has_what_its_path_can_do_or_less(tmp_path: Path) -> None:
    text = row(max_grid=4, features=None) + row(max_grid=8, features=["x"]) + row(features=[])
    rows = load(tmp_path, text + DECODE).rows
    assert [path.features for path in rows[:3]] == [
        {"varlen", "snapshots", "state_pool", "x", "y"},
        {"x"},
        set(),
    ]


def test_rows_are_read_whole(tmp_path: Path) -> None:
    measured = row(
        name="fused",
        max_grid=4,
        features=["varlen", "state_pool"],
        source="benchmarks/results/x.json",
        gpu="H200",
        date="2026-11-21",
        params=TILE,
    )
    path = load(tmp_path, measured + row() + DECODE).rows[0]
    assert (path.name, path.operator, path.max_grid) == ("fused", "prefill", 4)
    assert path.features == {"varlen", "state_pool"}
    assert path.params == TileParams(32, True, "ieee", num_stages=2)
    assert path.params_dict() == {**TILE, "num_stages": 2}
    assert path.measured and path.provenance == "H200, 2026-11-21, benchmarks/results/x.json"
    with pytest.raises(dataclasses.FrozenInstanceError):
        path.params.block_v = 16
    of_table = 'gpu = "H200"\n' + measured.replace('gpu = "H200"\n', "") + row() + DECODE
    first, second = load(tmp_path, of_table).rows[:2]
    assert first == path and not second.measured and second.provenance.startswith("not measured")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[table", "not valid TOML"),
        ("[extra]\n" + row() + DECODE, "unknown key extra"),
        ('release = "0.0.9"\n' + row() + DECODE, "written for release 0.0.9, this is "),
        ("source = 3\n" + row(source=None) + DECODE, "path 1: source must be str, got 3"),
        ("path = 3\n", "path must be an array of tables"),
        ("path = [3]\n", "path 1: must be a table, got 3"),
        (row(warps=4) + DECODE, "path 1: unknown key warps"),
        (DECODE + row(source=None), "path 2: missing key source"),
        (
            row("train") + DECODE,
            "path 1: operator of toy must be one of prefill, decode, got 'tr",
        ),
        (
            row(name="x") + DECODE,
            "path 1: name of a prefill path must be one of .*, got 'x'",
        ),
        (row(max_grid=True) + DECODE, "path 1: max_grid must be int, got True"),
        (row(max_grid=0) + DECODE, "path 1: max_grid must be at least 1, got 0"),
        (row(gpu=1) + DECODE, "path 1: gpu must be str, got 1"),
        (row(gpu="H200") + DECODE, "path 1: a measured row needs date too"),
        (row(date="2026-11-21") + DECODE, "path 1: a measured row needs gpu too"),
        (row(features=[1]) + DECODE, "path 1: features must be strings, got 1"),
        (
            row(name="small", features=["varlen", "z"]) + DECODE,
            "path 1: features must be of the prefill path small, which has snapshots, state_pool,"
            " varlen, x, y; got z",
        ),
        (
            row() + row("decode", "recurrent", features=["x"]),
            "path 2: features must be of the decode path recurrent, which has none; got x",
        ),
        (fused(block_v=0.5) + DECODE, r"path 1: params.block_v must be int, got 0.5"),
        (fused(block_v=True) + DECODE, r"path 1: params.block_v must be int, got True"),
        (
            fused(block_v=24) + DECODE,
            "path 1: params: block_v must be a multiple of 16, got 24",
        ),
        (
            fused(blockv=16) + DECODE,
            "path 1: params: unknown key blockv; TileParams has block_v, ",
        ),
        (fused(tma=None) + DECODE, "path 1: params: missing key tma"),
        (
            fused(precision="fp8") + DECODE,
            "params.precision must be one of 'ieee', 'tf32', got 'fp8'",
        ),
        (
            row(params={"x": 1}) + DECODE,
            "path 1: params: unknown key x; NoParams has none",
        ),
        (row(max_grid=8) + DECODE, "path 1: the last prefill row must have no max_grid"),
        (row(), "path: the last decode row must have no max_grid"),
        (
            row(max_grid=8) + row(max_grid=4) + row() + DECODE,
            "path 2: max_grid must not decrease, got 4 after 8",
        ),
        (
            row() + row(max_grid=4) + row() + DECODE,
            "path 2: a prefill row without max_grid precedes it",
        ),
    ],
)
def test_a_malformed_table_names_file_and_row(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'toy' / 'nvidia_sm90.toml'}: ")


def test_a_table_like_another_says_only_what_differs(tmp_path: Path) -> None:
    base = load(tmp_path, fused() + row("prefill", "small") + DECODE)
    changed = 'like = "nvidia_sm90"\n[[path]]\noperator = "prefill"\nname = "fused"\nmax_grid = 4\n'
    found = load(tmp_path, changed + "[path.params]\nblock_v = 64\n", KNOWN_TARGETS["B200"])
    params = dataclasses.replace(base.rows[0].params, block_v=64)
    assert found.rows == (
        dataclasses.replace(base.rows[0], max_grid=4, params=params),
        *base.rows[1:],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like = 3\n", "like must name another table of the folder, got 3"),
        ('like = "../nvidia_sm90"\n', "like must name another table of the folder, got '../nv"),
        ('like = "nvidia_sm75"\n', "nvidia_sm75.toml: cannot be read: No such file"),
        ('like = "nvidia_sm100"\n', "like must name a table with rows of its own that were not"),
        ('like = "nvidia_sm80"\n', "like must name a table with rows of its own that were not"),
        ('like = "nvidia_sm90"\npath = [3]\n', "path 1: it and its params must be tables, got 3"),
        (
            'like = "nvidia_sm90"\n' + row(name="small"),
            "path 1: nvidia_sm90.toml must have one row of its operator and name, has 0",
        ),
        (
            'like = "nvidia_sm90"\n' + row(name="a"),
            "path 1: nvidia_sm90.toml must have one row of its operator and name, has 2",
        ),
    ],
)
def test_a_table_that_cannot_be_like_another(tmp_path: Path, text: str, message: str) -> None:
    load(tmp_path, row(name="a", max_grid=4) + row(name="a") + DECODE)
    measured = row(gpu="A100", date="2026-11-21") + DECODE
    load(tmp_path, measured, KNOWN_TARGETS["A100"])
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text, KNOWN_TARGETS["B200"])


def test_lookup_at_the_ends_of_ranges(tmp_path: Path) -> None:
    selection = choose(three_ranges(tmp_path), "prefill", H200, frozenset())
    expected = {0: "small", 1: "small", 10: "small", 11: "middle", 100: "middle", 101: "fused"}
    assert {grid: selection.row(grid).name for grid in expected} == expected
    assert selection.row(2**40).name == "fused"
    assert [str(row) for row in selection.explained] == [
        "prefill grid 1 to 10: small (not measured, offline compilation)",
        "prefill grid 11 to 100: middle (not measured, offline compilation)",
        "prefill grid 101 and more: fused block_v=32 tma=True precision=ieee num_stages=2 "
        "(not measured, offline compilation)",
    ]


def test_refused_rows_are_taken_over_by_the_next_larger_then_by_the_largest(tmp_path: Path) -> None:
    table = load(
        tmp_path,
        row(name="a", max_grid=10)
        + row(name="b", max_grid=20, features=["x"])
        + row(name="c", max_grid=30, features=["x", "y"])
        + row(name="d")
        + DECODE,
    )
    selection = choose(table, "prefill", H200, frozenset({"x"}))
    assert [selection.row(grid).name for grid in (1, 20, 21, 1000)] == ["b", "b", "c", "c"]
    assert [(r.row.name, r.low, r.high, r.refusal) for r in selection.explained] == [
        ("a", None, None, "lacks x"),
        ("b", 1, 20, None),
        ("c", 21, None, None),
        ("d", None, None, "lacks x"),
    ]


def test_refusal_names_what_is_missing(tmp_path: Path) -> None:
    table = three_ranges(tmp_path)
    needs = frozenset({"snapshots", "varlen", "bf16_state"})
    refusals = [row.refusal for row in explain(table, "prefill", needs)]
    assert refusals == [
        "lacks bf16_state, snapshots",
        "lacks bf16_state",
        "lacks bf16_state, snapshots",
    ]
    with pytest.raises(LookupError) as error:
        choose(table, "prefill", H200, needs)
    assert str(error.value) == (
        f"no prefill path in {table.source} can serve this model: small lacks bf16_state, "
        "snapshots; middle lacks bf16_state; fused lacks bf16_state, snapshots"
    )


def test_of_alternatives_the_first_usable_serves(tmp_path: Path) -> None:
    vendor = row(name="vendor", features=["x"])
    table = load(
        tmp_path,
        row(name="ours", max_grid=10) + vendor + fused() + DECODE,
    )
    selection = choose(table, "prefill", H200, frozenset())
    assert [selection.row(grid).name for grid in (10, 11)] == ["ours", "vendor"]
    assert [r.refusal for r in selection.explained][-1] == "vendor is preferred for the same grids"
    only_vendor = choose(table, "prefill", H200, frozenset({"x"}))
    assert only_vendor.row(1).name == only_vendor.row(11).name == "vendor"


def test_feature_sets_are_the_distinct_ones_in_order(tmp_path: Path) -> None:
    table = three_ranges(tmp_path)
    assert feature_sets(table, "prefill") == [{"varlen"}, {"varlen", "snapshots"}]
    assert feature_sets(table, "decode") == [frozenset()]


def test_operators_are_kept_apart(tmp_path: Path) -> None:
    table = three_ranges(tmp_path)
    assert choose(table, "decode", H200, frozenset()).row(5).name == "recurrent"
    with pytest.raises(ValueError, match="operator of toy must be one of prefill, decode, got 'x'"):
        choose(table, "x", H200, frozenset())


def test_a_missing_table_says_where_it_was_looked_for(tmp_path: Path) -> None:
    turing = Target("nvidia", "sm75", 72, "T4")
    with pytest.raises(LookupError) as error:
        load_table(TOY, turing, directory=tmp_path)
    assert str(error.value) == (
        f"no toy kernel paths for sm75: no nvidia_sm75.toml in {tmp_path / 'toy'}"
    )


def test_the_users_table_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in ("shipped", "xdg/kda-dsv4", "mine")}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.setattr(path_table, "shipped_directory", lambda: places["shipped"])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("KDA_DSV4_CONFIG_DIR", raising=False)

    def found() -> Path:
        return load_table(TOY, H200).source.parents[1]

    three_ranges(places["shipped"])
    assert found() == places["shipped"]
    three_ranges(places["xdg/kda-dsv4"])
    assert found() == places["xdg/kda-dsv4"]
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(places["mine"]))
    assert found() == places["shipped"]
    three_ranges(places["mine"])
    assert found() == places["mine"]
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(tmp_path / "absent"))
    with pytest.raises(
        ValueError, match=r"KDA_DSV4_CONFIG_DIR must name a directory, got .*absent"
    ):
        load_table(TOY, H200)


def test_a_user_without_a_home_has_the_shipped_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_table, "shipped_directory", lambda: tmp_path)
    for name in ("HOME", "XDG_CONFIG_HOME", "KDA_DSV4_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    three_ranges(tmp_path)
    assert load_table(TOY, H200).source.parents[1] == tmp_path


def test_in_a_closed_home_there_is_no_table_and_a_closed_folder_that_was_named_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's HOME is often root's, whoever its user is."""
    home, shipped = tmp_path / "home" / "kda-dsv4", tmp_path / "shipped"
    for place in (home, shipped):
        place.mkdir(parents=True)
        three_ranges(place)
    whole = os.stat

    def closed(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if Path(path).is_relative_to(home / "toy"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(path_table, "shipped_directory", lambda: shipped)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home.parent))
    monkeypatch.delenv("KDA_DSV4_CONFIG_DIR", raising=False)
    monkeypatch.setattr(strict, "_reported", set())
    with caplog.at_level(logging.WARNING, "kda_dsv4"):
        for _ in range(2):
            assert load_table(TOY, H200).source.parents[1] == shipped
    assert caplog.text.count(f"no tables of yours are read from {home / 'toy'}: Permission") == 1
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(home))
    with pytest.raises(ValueError, match=r"nvidia_sm90\.toml: cannot be read: Permission denied"):
        load_table(TOY, H200)


@pytest.mark.parametrize("link", [False, True])
def test_what_has_a_tables_name_and_is_no_file_is_refused(
    link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped table served in its place, without a word."""
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(tmp_path))
    table = tmp_path / TOY.family / "nvidia_sm90.toml"
    table.parent.mkdir()
    table.symlink_to(tmp_path / "nothing") if link else table.mkdir()
    with pytest.raises(ValueError, match=r"nvidia_sm90\.toml: must be a file, got a folder"):
        load_table(TOY, H200)


def test_a_gpu_may_share_its_predecessors_table(tmp_path: Path) -> None:
    b300 = Target("nvidia", "sm103", 148, "B300")
    text = row() + DECODE
    load(tmp_path, text, KNOWN_TARGETS["B200"])
    assert load_table(TOY, b300, directory=tmp_path).source.name == "nvidia_sm100.toml"
    load(tmp_path, text, b300)
    assert load_table(TOY, b300, directory=tmp_path).source.name == "nvidia_sm103.toml"


def test_a_table_of_its_own_goes_before_a_users_shared_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped table for 99 KiB of shared memory, not what a user tuned on an A100."""
    shipped, mine = tmp_path / "shipped", tmp_path / "mine"
    monkeypatch.setattr(path_table, "shipped_directory", lambda: shipped)
    text = row() + DECODE
    for directory, arch in ((shipped, "sm86"), (mine, "sm80")):
        directory.mkdir()
        load(directory, text, Target("nvidia", arch, 1, ""))
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(mine))
    l40s = Target("nvidia", "sm89", 142, "L40S")
    assert load_table(TOY, l40s).source == shipped / "toy" / "nvidia_sm86.toml"
    (shipped / "toy" / "nvidia_sm86.toml").unlink()
    assert load_table(TOY, l40s).source == mine / "toy" / "nvidia_sm80.toml"


MEASURED = {
    "source": "benchmarks/results/x.json",
    "gpu": "NVIDIA B200",
    "date": "2026-11-21",
}


def test_what_was_measured_on_one_gpu_is_not_on_another_that_shares_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = row(**MEASURED) + DECODE
    own = load(tmp_path, text, KNOWN_TARGETS["B200"])
    shared = load_table(TOY, KNOWN_TARGETS["B300"], directory=tmp_path)
    assert (own.rows[0].measured, shared.rows[0].measured) == (True, False)
    assert shared.rows[0].provenance == f"not measured here, {own.rows[0].provenance}"
    assert shared.rows[1] == own.rows[1]
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(tmp_path))  # tuned on this machine
    tuned = load_table(TOY, KNOWN_TARGETS["B300"])
    assert tuned.rows == own.rows and tuned.rows[0].measured


def test_model_load_says_where_nothing_was_measured(tmp_path: Path) -> None:
    text = row(**MEASURED) + DECODE
    load(tmp_path, text, KNOWN_TARGETS["B200"])

    def note(name: str) -> str | None:
        table = load_table(TOY, KNOWN_TARGETS[name], directory=tmp_path)
        chosen = [choose(table, operator, H200, frozenset()) for operator in TOY.operator_names]
        return unmeasured(KNOWN_TARGETS[name], chosen)

    assert note("B200") is None
    assert note("B300") == (
        "no launch parameters of these paths were measured on B300 (sm103): kda-dsv4 check tells"
        " whether they are right here, kda-dsv4 tune searches faster ones"
    )
    (unmeasured_row, _) = load(tmp_path, row() + DECODE).rows
    chosen = forced(TOY, H200, None, unmeasured_row)
    assert unmeasured(KNOWN_TARGETS["cpu"], [chosen]) is None


def test_a_gpu_that_cannot_have_a_table_is_told_why(tmp_path: Path) -> None:
    with pytest.raises(
        LookupError, match=r"no toy kernel paths for gfx1250: no amd_gfx1250.toml in .*; Triton 3.6"
    ):
        load_table(TOY, Target("amd", "gfx1250", 256, "?"), directory=tmp_path)


def test_a_forced_selection_holds_the_given_rows_alone(tmp_path: Path) -> None:
    small, middle, _, decode = three_ranges(tmp_path).rows
    assert forced(TOY, H200, None, decode).row(10**6) is decode
    both = forced(TOY, H200, None, small, middle)
    assert [both.row(grid) for grid in (1, 10, 11, 10**6)] == [small, small, middle, middle]
