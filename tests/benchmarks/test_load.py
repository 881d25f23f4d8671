"""The load benchmark against a server that reads the answer in the prompt."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from backend_cli.eval import recall_task as recall
from benchmarks import load_sglang, load_vllm
from benchmarks.engines import load_run, load_traffic, vllm_server
from tests.benchmarks.fake_vllm import free_port

SCRIPTS = {"vllm": load_vllm, "sglang": load_sglang}


def run(
    out: Path, monkeypatch: pytest.MonkeyPatch, engine: str = "vllm"
) -> tuple[int, dict[str, Any]]:
    """Two "minutes" of two seconds, with a GPU whose memory does not change."""
    script = SCRIPTS[engine]
    where = {engine: "1.2.3", "gpu": "none", "torch": "-", "triton": "-"}
    monkeypatch.setattr(load_run, "versions", lambda engine: where)
    monkeypatch.setattr(load_run, "gpu_mib", lambda group: 1000.0)
    monkeypatch.setattr(load_run, "SAMPLE_S", 0.2)
    monkeypatch.setattr(load_run, "MINUTE", 2.0)
    monkeypatch.setattr(load_run, "HOST_GROWTH", 9.0)
    monkeypatch.setattr(load_traffic, "CYCLE", ((1, 1), (1, 8)))
    monkeypatch.setattr(load_traffic, "SHORT_PROMPTS", 6)
    traffic = load_traffic.run
    monkeypatch.setattr(load_traffic, "run", lambda url, t, s, z: traffic(url, t, 4.0, z))
    lost, hits = script.COUNTERS.preemptions, script.COUNTERS.hits
    found = itertools.chain([{lost: 1.0, hits: 0.0}, {}, {lost: 4.0, hits: 9.0}])
    monkeypatch.setattr(vllm_server.Server, "counters", lambda self: next(found))
    argv = [f"load_{engine}", str(out), "--minutes", "2", "--port", str(free_port())]
    monkeypatch.setattr(sys, "argv", [*argv, "--timeout", "30"])
    return script.main(), json.loads(out.read_text())


@pytest.mark.parametrize("engine", SCRIPTS)
def test_every_kind_of_request_is_judged(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    code, result = run(tmp_path / "load.json", monkeypatch, engine)
    verdict = result["verdict"]
    assert result["engine"] == engine and result["script"] == f"benchmarks/load_{engine}.py"
    assert result["minutes"] == 2
    assert set(result["requests"]) == set(load_traffic.KINDS)
    assert verdict["answers"]["wrong"] == 0, result["wrong"]
    assert verdict["preemption and prefix hits"] == {
        "well": True,
        "preemptions": 3.0,
        "tokens_hit": 9.0,
    }
    assert verdict["memory, gpu_mib"]["growth"] == 0.0 and verdict["afterwards"]["right"] == 320
    assert result["memory"] and all(row["host_mib"] > 1 for row in result["memory"])
    assert {row["concurrency"] for row in result["latency"]} == {1, 8}
    others = [name for name, found in verdict.items() if not found["well"] and name != "latency"]
    assert others == [] and code == int(not verdict["latency"]["well"])


def test_host_memory_has_no_pages_of_files() -> None:
    """A process that maps a file and takes memory of its own: only the latter counts."""
    code = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "read = sum(mapped[::4096])\n"
        "own = bytearray(b'x') * (int(sys.argv[2]) << 20)\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * (96 << 20))
        file.flush()
        used = {}
        for own in (8, 40):
            process = subprocess.Popen(
                [sys.executable, "-c", code, file.name, str(own)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            used[own] = load_run.host_mib(process.pid)
            process.communicate()
    assert 30 < used[40] - used[8] < 34
    assert used[8] < 60


def test_a_wrong_answer_fails_the_run(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_WRONG", "50")
    code, result = run(tmp_path / "load.json", monkeypatch)
    assert code == 1 and result["verdict"]["answers"]["wrong"] > 0
    assert "got 'wrong" in result["wrong"][0]["why"]


def test_the_same_seed_draws_the_same_requests() -> None:
    questions = recall.read_questions(vllm_server.RECALL / "questions.jsonl").head(20)
    shorts = [load_traffic.Short([1, 2, 3], "x")]
    a, b = (load_traffic.Traffic(questions, shorts, 3) for _ in range(2))
    drawn = [a.next() for _ in range(300)]
    assert drawn == [b.next() for _ in range(300)]
    kinds = {request.kind for request in drawn}
    assert kinds == set(load_traffic.KINDS)
    assert all((r.right is None) == (r.kind == "aborted") for r in drawn)
    assert len({r.body["cache_salt"] for r in drawn}) > 100


def test_memory_that_grows_and_a_cliff_are_not_well() -> None:
    memory = load_run.Memory(0, 0.0)
    memory.samples = [
        {"at_s": float(s), "gpu_mib": 1000.0 + s, "host_mib": 1.0} for s in range(0, 180, 2)
    ]
    result = {
        "requests": {"recall": {"requests": 5, "wrong": 0}},
        "at_rest": {"num_requests_running": 0.0},
        "after": {"right": 319},
        "counters": {},
        "minutes": 3.0,
        "memory": memory.by_minute(3),
        "latency": [{"concurrency": 1, "minute": m, "latency_ms": 10.0 + 10 * m} for m in range(3)],
    }
    found = load_run.verdict(result, load_vllm.COUNTERS)
    well = {name: row["well"] for name, row in found.items()}
    assert well == {
        "answers": True,
        "at rest": True,
        "afterwards": False,
        "preemption and prefix hits": False,
        "memory, gpu_mib": False,
        "memory, host_mib": True,
        "latency": False,
    }
    assert (
        found["memory, gpu_mib"]["last"] == 1149.0 and found["memory, gpu_mib"]["first"] == 1029.0
    )
    with pytest.raises(ValueError, match="from 180 to 240 s, got none"):
        memory.by_minute(4)
