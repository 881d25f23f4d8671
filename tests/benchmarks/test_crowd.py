"""The benchmark of a full server: a row of each side and part, from what the sides leave."""

from __future__ import annotations

from typing import Any

from benchmarks import crowd
from benchmarks.engines import serve_work

HEAD = {"gpu": "none", "engine": "fake", "date": "2026-11-27"}
SHORT, LONG = "9 requests at once, 64 in and 7 out", "3 requests at once, 1,024 in and 7 out"


def side_of(running: int | None, **more: Any) -> dict[str, Any]:
    rows = [
        {"what": "model load", "kind": "load", "ms": 5.0},
        *(
            {"what": what, "kind": "crowd", "ms": 9.0, "tokens_per_s": rate, "running": running}
            for what, rate in ((SHORT, 80.04), (LONG, 20.0))
        ),
    ]
    engine = {"blocks": 70, "max_mamba_cache_size": 60}
    held = {"head": HEAD, "engine": engine, "memory_after_load_mib": 100, "failed": {}}
    return {**held, "rows": rows, **more}


def test_running_requests_of_sglang_are_those_of_the_part_in_its_log() -> None:
    begins = f"{serve_work.SAID}{serve_work.BEGINS}"
    log = f"""Decode batch, #running-req: 8, #token: 1
{begins}{SHORT}
Prefill batch, #new-seq: 3, #running-req: 2, #queue-req: 9
Decode batch, #running-req: 5, #token: 1
{begins}{LONG}
Decode batch, #running-req: 3, #token: 1
"""
    found = crowd.document("sglang", {"flag:float16": side_of(None, log=log)})
    assert found["gpu"] == "none" and not found["failed"]
    assert [(row["side"], row["state"]) for row in found["rows"]] == [("flag", "float16")] * 2
    assert [row["running"] for row in found["rows"]] == [5, 3]
    assert [row["slots"] for row in found["rows"]] == [60, 60]
    assert [row["tokens_per_s"] for row in found["rows"]] == [80.0, 20.0]


def test_a_side_that_fails_is_named_and_the_others_have_rows() -> None:
    sides = {
        "upstream:float32": {"failed": {"process": "no file"}},
        "flag:float32": side_of(4),
        "flag:float16": side_of(4, rows=[], left_out=["crowd"]),
    }
    found = crowd.document("vllm", {side: {"log": "", **data} for side, data in sides.items()})
    lost = {"process": "no file"}, {"crowd": "no time was left"}
    assert found["failed"] == dict(zip(("upstream:float32", "flag:float16"), lost, strict=True))
    assert [(row["running"], row["slots"]) for row in found["rows"]] == [(4, 70), (4, 70)]


def test_a_part_that_began_and_did_not_end_has_its_requests_and_no_rate() -> None:
    log = f"{serve_work.SAID}{serve_work.BEGINS}{SHORT}\nDecode batch, #running-req: 5, #token: 1\n"
    cut = side_of(None, rows=[], failed={"process": "exit status -9"}, log=log)
    found = crowd.document("sglang", {"upstream:float32": cut}, drafts=7)
    (row,) = found["rows"]
    assert (row["what"], row["running"], row["slots"], row["tokens_per_s"]) == (SHORT, 5, 60, None)
    assert found["failed"] == {"upstream:float32": {"process": "exit status -9"}}


def test_upstream_runs_in_the_formats_that_it_takes() -> None:
    assert crowd.SIDES["vllm"] == [
        *("upstream:float32", "flag:float32", "flag:float16", "flag:bfloat16")
    ]
    assert len(crowd.SIDES["sglang"]) == 6
