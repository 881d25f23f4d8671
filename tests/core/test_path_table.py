from __future__ import annotations

from pathlib import Path

import pytest

from backend_core.tables import select as path_table
from backend_core.tables.select import PathTable, explain, feature_sets, load_table, select
from backend_core.target import KNOWN_TARGETS, Target

H200 = KNOWN_TARGETS["H200"]
HEADER = '[table]\nfamily = "kda"\nvendor = "nvidia"\narch = "sm90"\n'


def row(phase: str = "prefill", name: str = "two_stage", **keys: object) -> str:
    """One [[path]]; a key of None is left out."""
    entry: dict[str, object] = {
        "phase": phase,
        "name": name,
        "features": [],
        "measured": False,
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


def load(directory: Path, text: str, target: Target = H200) -> PathTable:
    file = directory / "kda" / f"{target.key}.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return load_table("kda", target, directory=directory)


def three_buckets(directory: Path) -> PathTable:
    return load(
        directory,
        HEADER
        + row(name="small", max_grid=10, features=["varlen"])
        + row(name="middle", max_grid=100, features=["varlen", "snapshots"])
        + row(name="large", features=["varlen"], params={"block_v": 32, "tma": True, "kind": "a"})
        + DECODE,
    )


def test_rows_are_read_whole(tmp_path: Path) -> None:
    measured = row(
        name="fused",
        max_grid=4,
        features=["varlen", "state_pool"],
        measured=True,
        source="benchmarks/results/x.json",
        gpu="H200",
        date="2026-11-21",
        requires_package="flashinfer",
        params={"block_v": 16, "tma": True, "precision": "ieee"},
    )
    path = load(tmp_path, HEADER + measured + row() + DECODE).rows[0]
    assert (path.name, path.phase, path.max_grid) == ("fused", "prefill", 4)
    assert path.features == {"varlen", "state_pool"}
    assert path.params == {"block_v": 16, "tma": True, "precision": "ieee"}
    assert path.measured and path.provenance == "H200, 2026-11-21, benchmarks/results/x.json"
    assert path.requires_package == "flashinfer"
    with pytest.raises(TypeError):
        path.params["block_v"] = 32  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[table", "not valid TOML"),
        (HEADER + "[extra]\n" + row() + DECODE, "unknown key extra"),
        (HEADER.replace("sm90", "sm80") + row() + DECODE, r"\[table\] must be .*'sm90'.* got "),
        (row() + DECODE, r"\[table\] must be .* got None"),
        ("path = 3\n" + HEADER, "path must be an array of tables"),
        ("path = [3]\n" + HEADER, "path 1: must be a table, got 3"),
        (HEADER + row(warps=4) + DECODE, "path 1: unknown key warps"),
        (HEADER + DECODE + row(source=None), "path 2: missing key source"),
        (HEADER + row("train") + DECODE, "path 1: phase must be one of prefill, decode, got 'tr"),
        (HEADER + row(max_grid=True) + DECODE, "path 1: max_grid must be int, got True"),
        (HEADER + row(max_grid=0) + DECODE, "path 1: max_grid must be at least 1, got 0"),
        (HEADER + row(measured=1) + DECODE, "path 1: measured must be bool, got 1"),
        (HEADER + row(measured=True) + DECODE, "path 1: measured = true needs date, gpu"),
        (HEADER + row(features=[1]) + DECODE, "path 1: features must be strings, got 1"),
        (HEADER + row(requires_package="a.b") + DECODE, "must be a top-level package, got 'a.b'"),
        (HEADER + row(params={"x": 0.5}) + DECODE, r"path 1: params.x must be int, bool or str"),
        (HEADER + row(max_grid=8) + DECODE, "path 1: the last prefill row must have no max_grid"),
        (HEADER + row(), "path: the last decode row must have no max_grid"),
        (
            HEADER + row(max_grid=8) + row(max_grid=4) + row() + DECODE,
            "path 2: max_grid must not decrease, got 4 after 8",
        ),
        (
            HEADER + row() + row(max_grid=4) + row() + DECODE,
            "path 2: a prefill row without max_grid precedes it",
        ),
    ],
)
def test_a_malformed_table_names_file_and_row(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'kda' / 'nvidia_sm90.toml'}: ")


def test_lookup_at_bucket_boundaries(tmp_path: Path) -> None:
    selection = select(three_buckets(tmp_path), "prefill")
    expected = {0: "small", 1: "small", 10: "small", 11: "middle", 100: "middle", 101: "large"}
    assert {grid: selection.lookup(grid).name for grid in expected} == expected
    assert selection.lookup(2**40).name == "large"
    assert [str(row) for row in selection.explain()] == [
        "prefill grid 1 to 10: small (not measured, offline compilation)",
        "prefill grid 11 to 100: middle (not measured, offline compilation)",
        "prefill grid 101 and more: large block_v=32 tma=True kind=a "
        "(not measured, offline compilation)",
    ]


def test_refused_rows_are_taken_over_by_the_next_larger_then_by_the_largest(tmp_path: Path) -> None:
    table = load(
        tmp_path,
        HEADER
        + row(name="a", max_grid=10)
        + row(name="b", max_grid=20, features=["x"])
        + row(name="c", max_grid=30, features=["x", "y"])
        + row(name="d")
        + DECODE,
    )
    selection = select(table, "prefill", frozenset({"x"}))
    assert [selection.lookup(grid).name for grid in (1, 20, 21, 1000)] == ["b", "b", "c", "c"]
    assert [(r.path.name, r.low, r.high, r.refusal) for r in selection.explain()] == [
        ("a", None, None, "lacks x"),
        ("b", 1, 20, None),
        ("c", 21, None, None),
        ("d", None, None, "lacks x"),
    ]


def test_refusal_names_what_is_missing(tmp_path: Path) -> None:
    table = three_buckets(tmp_path)
    needs = frozenset({"snapshots", "varlen", "bf16_state"})
    refusals = [row.refusal for row in explain(table, "prefill", needs)]
    assert refusals == [
        "lacks bf16_state, snapshots",
        "lacks bf16_state",
        "lacks bf16_state, snapshots",
    ]
    with pytest.raises(LookupError) as error:
        select(table, "prefill", needs)
    assert str(error.value) == (
        f"no prefill path in {table.source} can serve this model: small lacks bf16_state, "
        "snapshots; middle lacks bf16_state; large lacks bf16_state, snapshots"
    )


def test_of_alternatives_the_first_usable_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = row(name="vendor", requires_package="flashinfer", features=["x"])
    table = load(
        tmp_path,
        HEADER
        + row(name="ours", max_grid=10)
        + vendor
        + row(name="ours", params={"b": 2})
        + DECODE,
    )
    monkeypatch.setattr(path_table, "_is_installed", lambda package: package == "flashinfer")
    selection = select(table, "prefill")
    assert [selection.lookup(grid).name for grid in (10, 11)] == ["ours", "vendor"]
    assert [r.refusal for r in selection.explain()][-1] == "vendor is preferred for the same grids"
    only_vendor = select(table, "prefill", frozenset({"x"}))
    assert only_vendor.lookup(1).name == only_vendor.lookup(11).name == "vendor"

    monkeypatch.setattr(path_table, "_is_installed", lambda package: False)
    selection = select(table, "prefill")
    assert selection.lookup(11).params == {"b": 2}
    refusal = [r.refusal for r in selection.explain()][1]
    assert refusal == "needs the package flashinfer, which is not installed"


def test_feature_sets_are_the_distinct_ones_in_order(tmp_path: Path) -> None:
    table = three_buckets(tmp_path)
    assert feature_sets(table, "prefill") == [{"varlen"}, {"varlen", "snapshots"}]
    assert feature_sets(table, "decode") == [frozenset()]


def test_phases_are_kept_apart(tmp_path: Path) -> None:
    table = three_buckets(tmp_path)
    assert select(table, "decode").lookup(5).name == "recurrent"
    with pytest.raises(ValueError, match="phase of kda must be one of prefill, decode, got 'x'"):
        select(table, "x")


def test_a_missing_table_says_where_it_was_looked_for(tmp_path: Path) -> None:
    turing = Target("nvidia", "sm75", 72, "T4")
    with pytest.raises(LookupError) as error:
        load_table("kda", turing, directory=tmp_path)
    assert str(error.value) == (
        f"no kda kernel paths for sm75: no nvidia_sm75.toml in {tmp_path / 'kda'}"
    )
    with pytest.raises(ValueError, match="family must be one of kda, dsv4, got 'gdn'"):
        load_table("gdn", H200)


def test_the_users_table_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("KDA_DSV4_CONFIG_DIR", raising=False)
    shipped = load_table("kda", H200)
    assert tmp_path not in shipped.source.parents

    xdg = tmp_path / "xdg" / "kda-dsv4"
    xdg.mkdir(parents=True)
    three_buckets(xdg)
    assert load_table("kda", H200).source == xdg / "kda" / "nvidia_sm90.toml"

    configured = tmp_path / "mine"
    configured.mkdir()
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(configured))
    assert load_table("kda", H200).source == shipped.source
    three_buckets(configured)
    assert load_table("kda", H200).source == configured / "kda" / "nvidia_sm90.toml"

    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(tmp_path / "absent"))
    with pytest.raises(
        ValueError, match=r"KDA_DSV4_CONFIG_DIR must name a directory, got .*absent"
    ):
        load_table("kda", H200)


def test_a_part_may_share_its_elders_table() -> None:
    b300 = Target("nvidia", "sm103", 148, "B300")
    assert load_table("kda", b300).source.name == "nvidia_sm100.toml"
