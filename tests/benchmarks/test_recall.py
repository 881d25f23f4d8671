"""The recall benchmark against a server that reads the answer in the prompt."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backend_core.target import KNOWN_TARGETS
from benchmarks import recall_vllm
from kda_backend import select
from kda_backend.selection import KdaShape
from tests.benchmarks.fake_vllm import free_port


def run(out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(recall_vllm, "versions", lambda engine: {"vllm": "0.33.0"})
    base = ["recall_vllm", str(out), "--items", "12", "--timeout", "30"]
    monkeypatch.setattr(sys, "argv", [*base, "--port", str(free_port()), *options])
    return recall_vllm.main()


def test_every_round_is_asked_and_kept(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    assert run(out, monkeypatch, "--only", "upstream", "sleep", "--beside", "2") == 0
    result = json.loads(out.read_text())
    assert list(result["servers"]) == ["upstream", "flag, after sleep and reload"]
    upstream, slept = result["servers"].values()
    assert [r["concurrency"] for r in upstream["rounds"]] == [1, 16, 64, 64]
    assert all(r["right"] == 12 for r in [*upstream["rounds"], *slept["rounds"]])
    cached = [r["cached_prompt_tokens"] > 0 for r in upstream["rounds"]]
    assert cached == [False, False, False, True]
    assert [r.get("after") for r in slept["rounds"]] == [
        None,
        "sleep and wake",
        "reload of weights",
        "sleep without weights, wake, reload",
    ]
    assert "--attention-backend" in slept["command"] and "KDA" in slept["command"]
    assert "--attention-backend" not in upstream["command"]
    assert upstream["counters"] == {
        "vllm:num_preemptions_total": 3.0,
        "vllm:prefix_cache_hits_total": 5.0,
        "vllm:num_requests_running": 0.0,
        "vllm:kv_cache_usage_perc": 0.0,
    }
    assert upstream["log"] == ["kda-dsv4: served by a fake"]
    said = (tmp_path / "out_sleep.log").read_text()
    posts = [line for line in said.splitlines() if line.startswith("POST")]
    assert posts == [
        "POST /sleep?level=1 {}",
        "POST /wake_up {}",
        'POST /collective_rpc {"method": "reload_weights"}',
        "POST /sleep?level=2 {}",
        "POST /wake_up {}",
        'POST /collective_rpc {"method": "reload_weights"}',
    ]


def test_wrong_answers_are_counted(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_WRONG", "4")
    out = tmp_path / "out.json"
    assert run(out, monkeypatch, "--only", "flag") == 0
    rounds = json.loads(out.read_text())["servers"]["flag"]["rounds"]
    assert [r["right"] for r in rounds] == [9, 9, 9, 9]


def test_a_server_that_ends_is_a_failure_with_its_last_lines(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_BROKEN", "1")
    out = tmp_path / "out.json"
    assert run(out, monkeypatch, "--only", "flag", "fp8") == 1
    failed = json.loads(out.read_text())["failed"]
    assert set(failed) == {"flag", "flag, fp8 KV cache"}
    assert "ended with 1" in failed["flag"] and "broken as asked" in failed["flag"]


def test_the_table_of_short_segments_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall_vllm.write_short_segments(tmp_path)
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(tmp_path))
    shape = KdaShape(2, 2, 128, 128)
    row = select.__wrapped__(KNOWN_TARGETS["H200"], shape).prefill.row(2 * 5, longest=300)
    assert (row.name, row.params.segment_chunks) == ("segmented_sm90", 2)


def test_a_benchmark_that_is_ended_ends_its_servers(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from benchmarks.engines.vllm_server import Server, end_with_servers

class Sleeps(Server):
    def is_ready(self):
        return True

end_with_servers()
server = Sleeps([], 1, Path({str(tmp_path / "log")!r}))
server.command = ["sleep", "60"]
with server:
    print(server.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    until = time.monotonic() + 5
    state = Path(f"/proc/{int(ended.stdout)}/stat")
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"
