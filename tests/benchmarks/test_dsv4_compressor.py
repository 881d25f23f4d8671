"""The compressor's benchmark: what it finds wrong, and what a peer that fails leaves behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backend_core.tables.select import load_table, select, shipped_directory
from backend_core.target import KNOWN_TARGETS
from benchmarks import bench_dsv4_compressor as bench
from benchmarks import dsv4_records as records
from dsv4_backend.launch_params import TABLES
from dsv4_backend.testing.engine import default_device
from dsv4_backend.testing.steps import TimedStep

CASES = [
    *(("decode", part, ratio, 3, ends) for part, ratio in bench.PARTS for ends in ("all", "mixed")),
    *(("prefill", part, 4, 24, "all") for part in ("main", "indexer")),
    ("prefill", "main", 128, 256, "all"),
]


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("call_time_ms", "host_time_ms", "graph_time_ms"):
        monkeypatch.setattr(bench, name, lambda call: (call(), 1.0)[1])


@pytest.mark.parametrize("layout", bench.PEERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_ours_are_float64_s_records(layout: str, case: bench.Case) -> None:
    row = bench.measure(layout, case, bench.Peers(), 4000.0)
    assert row["ours_float64_bytes"] >= 0.99
    assert row["ours_gpu_ms"] == 1.0 and row["floor_ms"] > 0
    peers = [name for names in bench.PEERS.values() for name in names]
    assert {name for name in peers if row[f"{name}_gpu_ms"] is None} == set(row["not_run"])


def _wrong_record(part: TimedStep) -> None:
    part.call()()
    part.cache[0, 3] ^= 0x40


def _pad_written(part: TimedStep) -> None:
    part.call()()
    part.cache[0, -1] = 7


def _row_not_written(part: TimedStep) -> None:
    before = part.state.clone()
    part.call()()
    part.state.copy_(before)


def _other_row_written(part: TimedStep) -> None:
    part.call()()
    part.state[0, 0, 0] += 1.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_wrong_record, "of the bytes are float64's"),
        (_pad_written, "outside the records"),
        (_row_not_written, "values of the states differ"),
        (_other_row_written, "a state row of another token"),
    ],
)
def test_a_peer_s_fault_is_its_reason(fault: Callable[[TimedStep], None], message: str) -> None:
    peers = bench.Peers(make={"sglang_jit": lambda part: lambda: fault(part)})
    row = bench.measure("ring", ("decode", "main", 4, 2, "all"), peers, 4000.0)
    assert message in row["not_run"]["sglang_jit"]
    assert row["sglang_jit_gpu_ms"] is None


def test_a_peer_with_our_records_has_none_that_differ() -> None:
    peers = bench.Peers(make={"sglang_jit": lambda part: part.call()})
    row = bench.measure("ring", ("decode", "both", 4, 3, "all"), peers, 4000.0)
    assert (row["sglang_jit_equal_bytes"], row["sglang_jit_differing_bytes"]) == (1.0, 0)
    assert row["sglang_jit_difference"] == 0.0 and row["sglang_jit_gpu_ms"] == 1.0
    assert "sglang_jit" not in row["not_run"]


def test_bytes_that_differ_are_counted() -> None:
    (part,) = bench.make_parts("ring", ("decode", "main", 4, 2, "all"))
    one = records.run(part, part.call())
    data = one.data.clone()
    data[0, :3] += 1
    other = records.Written(data, one.scales, one.rows, False)
    assert records.differing_bytes(one, other) == 3
    assert records.difference(part, one, records.values(part, other)) > 0
    assert one.rows.device.type == default_device().type and torch.equal(one.rows, part.kv_score)


WORKER = """
import json, os, sys
start, skip = int(sys.argv[2]), json.loads(sys.argv[4])
print("head", json.dumps({"gpu": "none"}))
for task in range(start, 5):
    print("at", json.dumps([task, "ours"]))
    row = {"task": task, "not_run": [r for t, n, r in skip if t in (task, None)]}
    if task in BROKEN and not row["not_run"]:
        print("at", json.dumps([task, PEER]), flush=True)
        os.abort()
    print("row", json.dumps(row), flush=True)
"""


def _supervised(tmp_path: Path, broken: str, peer: str = "'sglang_jit'") -> list[dict[str, object]]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace("BROKEN", broken).replace("PEER", peer))
    bench.supervise([sys.executable, str(script)], tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["gpu"] == "none"
    return report["rows"]  # type: ignore[no-any-return]


def test_a_crash_of_a_peer_costs_its_case_alone(tmp_path: Path) -> None:
    rows = _supervised(tmp_path, "(1, 3)")
    assert [row["task"] for row in rows] == [0, 1, 2, 3, 4]
    said = ["its process ended with -6 in this case"]
    assert [row["not_run"] for row in rows] == [[], said, [], said, []]


def test_a_third_crash_leaves_the_peer_out(tmp_path: Path) -> None:
    rows = _supervised(tmp_path, "(0, 1, 2, 3, 4)")
    assert [len(row["not_run"]) for row in rows] == [1, 1, 1, 1, 1]  # type: ignore[arg-type]


def test_a_crash_of_ours_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="outside of a peer"):
        _supervised(tmp_path, "(2,)", "'ours'")


def _files() -> list[Path]:
    """Result files with this benchmark's present rows; those of before name no engine's layout."""
    folder = Path(bench.__file__).parent / "results"
    reports = {file: json.loads(file.read_text()) for file in folder.glob("dsv4_compressor_*.json")}
    return [f for f, r in reports.items() if any("vllm_cutedsl_gpu_ms" in x for x in r["rows"])]


def test_a_result_has_every_peer_s_time_or_why_not() -> None:
    assert _files()
    for file in _files():
        report = json.loads(file.read_text())
        for row in (row for row in report["rows"] if row["part"] in ("main", "indexer", "both")):
            for name in (name for names in bench.PEERS.values() for name in names):
                time, reason = row[f"{name}_gpu_ms"], row["not_run"].get(name)
                assert (time is None) == bool(reason), (file.name, row["part"], row["n"], name)
                if time is not None:
                    assert time > 0 and row[f"{name}_float64_bytes"] >= 0.99
                    assert row[f"{name}_equal_bytes"] > 0.999


def test_what_is_slower_than_cutedsl_is_left_to_it() -> None:
    """Decode below 1.3 times and prefill below 1.0 times the faster of vLLM's two steps is C128
    decode alone, and the table leaves its steps to CuTe DSL but for those few requests of which
    most end no window: a step's mean is there at least 1.3 times as fast."""
    file = Path(bench.__file__).parent / "results" / "dsv4_compressor_cutedsl_h200.json"
    rows = json.loads(file.read_text())["rows"]
    slow = set()
    times: dict[tuple[int, str], tuple[float, float]] = {}
    for row in rows:
        peers = [row[f"{name}_gpu_ms"] for name in bench.PEERS["paged"]]
        ratio = min(peer for peer in peers if peer is not None) / row["ours_gpu_ms"]
        if ratio < (1.3 if row["phase"] == "decode" else 1.0):
            slow.add((row["phase"], row["part"], row["ratio"]))
        if (row["phase"], row["part"], row["ratio"]) == ("decode", "main", 128):
            times[row["n"], row["ends"]] = (row["ours_gpu_ms"], row["vllm_cutedsl_gpu_ms"])
    assert slow == {("decode", "main", 128)}
    table = load_table(TABLES, KNOWN_TARGETS["H200"], directory=shipped_directory())
    selection = select(table, "main_c128_decode", frozenset())
    for n in (1, 2, 4, 8, 16, 32, 64):
        none = (127 / 128) ** n  # a step in which no window ends
        # neither draw of mixed requests has an end up to 64; a step of few requests that end one
        mean = [none * times[1, "mixed"][i] + (1 - none) * times[1, "all"][i] for i in (0, 1)]
        left = selection.lookup(n).params.left_to_cutedsl
        assert left == (mean[1] / mean[0] < 1.3), (n, mean)
    for n in (128, 256, 512):
        assert selection.lookup(n).params.left_to_cutedsl
