"""The queue of GPU runs, with commands that need no GPU."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path

import pytest

from benchmarks import run_queue
from benchmarks.run_queue import Job, Queue, load_queue

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "root"
    place.mkdir()
    monkeypatch.setattr(run_queue, "ROOT", place)
    return place


def run(jobs: list[Job], tmp_path: Path, gpus: int = 1, seconds: float = 60.0) -> dict[str, str]:
    folder = tmp_path / "out"
    folder.mkdir(exist_ok=True)
    outcomes = Queue(jobs, folder, gpus, time.monotonic() + seconds).run({"given": "value"})
    return {outcome.name: outcome.status for outcome in outcomes}


def test_results_and_logs_are_kept(tmp_path: Path) -> None:
    jobs = [
        Job("good", "sh -c 'echo {given} $CUDA_VISIBLE_DEVICES > made.json'", 5, ("made.json",)),
        Job("bad", "sh -c 'echo why; exit 3'", 5),
        Job("silent", "true", 5, ("nothing.json",)),
        Job("unset", "echo {folder}", 5),
        Job("wide", "true", 5, gpus=2),
    ]
    ends = run(jobs, tmp_path)
    assert ends == dict.fromkeys(("bad", "silent"), "failed") | {
        "good": "done",
        "unset": "waiting",
        "wide": "waiting",
    }
    out = tmp_path / "out"
    assert (out / "made.json").read_text() == "value 0\n"
    assert (out / "bad.log").read_text() == "why\n"
    rows = {row["name"]: row for row in json.loads((out / "queue.json").read_text())["jobs"]}
    assert rows["good"]["results"] == ["made.json"]
    assert "--set folder" in rows["unset"]["reason"] and "2 GPUs" in rows["wide"]["reason"]
    assert set(run_queue.done_before(out)) == {"good"}


def test_an_old_result_does_not_count(tmp_path: Path, root: Path) -> None:
    (root / "old.json").write_text("of another day")
    os.utime(root / "old.json", (1, 1))
    assert run([Job("lazy", "true", 5, ("old.json",))], tmp_path) == {"lazy": "failed"}
    assert not (tmp_path / "out" / "old.json").exists()


def test_time(tmp_path: Path, root: Path) -> None:
    """What takes twice its time is ended with its children, and what is too long is not started."""
    jobs = [
        Job("hangs", "sh -c 'sh -c \"sleep 3; touch child\" & sleep 30'", 0.4),
        Job("long", "touch long", 100),
        Job("short", "touch short", 1),
    ]
    ends = run(jobs, tmp_path, seconds=20)
    assert ends == {"hangs": "stopped", "long": "waiting", "short": "done"}
    time.sleep(2.5)
    assert (root / "short").exists() and not (root / "long").exists()
    assert not (root / "child").exists()


def test_gpus_are_shared_in_the_order_of_the_list(tmp_path: Path, root: Path) -> None:
    note = "sh -c 'echo {}+ >> log; sleep 0.5; echo {}- >> log'"
    jobs = [Job(name, note.format(name, name), 2, beside=2) for name in "ab"]
    jobs += [Job(name, note.format(name, name), 2) for name in "cd"]
    run(jobs, tmp_path)
    lines = (root / "log").read_text().split()
    assert sorted(lines[:2]) == ["a+", "b+"] and sorted(lines[2:4]) == ["a-", "b-"]
    assert lines[4:] == ["c+", "c-", "d+", "d-"]


@pytest.mark.parametrize(
    "row",
    [
        "name = 'x'\ncommand = 'true'\nseconds = 1\nsecond = 2",
        "name = 'x'\ncommand = ''\nseconds = 0",
    ],
)
def test_a_wrong_row_is_refused(row: str, tmp_path: Path) -> None:
    (tmp_path / "queue.toml").write_text(f"[[job]]\n{row}\n")
    with pytest.raises(ValueError, match="x"):
        load_queue(tmp_path / "queue.toml")


@pytest.mark.parametrize("job", load_queue(), ids=lambda job: job.name)
def test_the_shipped_queue_names_what_exists(job: Job) -> None:
    words = shlex.split(job.command)
    assert words[0] == "{python}"
    script = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
    assert (ROOT / script).is_file(), script
    for name in job.results:
        assert name.startswith("benchmarks/results/") and name in job.command, name
