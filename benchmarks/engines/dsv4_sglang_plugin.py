"""Changes to sglang's scheduler process for `dsv4_sglang_side`; `install` is the entry point.

Weights are drawn as sglang initialises its dummies. mHC's Sinkhorn step, which TileLang compiles,
is sglang's own in Triton on every side; the rest of mHC has torch functions of sglang's, which
environment variables choose. With the flag, attention and compressors are watched. The scheduler
gets a method ``dsv4_benchmark``, which the engine's ``collective_rpc`` calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from backend_core.engines.after_import import after_import
from benchmarks.engines.dsv4_attention import AttentionWatch
from benchmarks.engines.dsv4_model import draw_weights, halve_rows
from benchmarks.engines.dsv4_sglang_watch import RecordWatch

_attention, _records = AttentionWatch(), RecordWatch()


def install() -> None:
    """In each process of the engine; acts in the one that loads the model."""
    after_import("sglang.srt.model_loader.loader", _draw)
    after_import("sglang.kernels.ops.layernorm.mhc", _without_tilelang)
    after_import("sglang.srt.managers.scheduler", _add_method)
    after_import("mla_backend.engines.sglang_sparse", lambda it: watch_attention(it, _attention))
    after_import("dsv4_backend.engines.sglang_compressor", _records.watch_v4)
    after_import("dsv4_backend.engines.sglang_low_ratio", _records.watch_v41)


def _draw(loader: ModuleType) -> None:
    loader.initialize_dummy_weights = draw_weights  # type: ignore[attr-defined]


def _without_tilelang(mhc: ModuleType) -> None:
    mhc.hc_split_sinkhorn = mhc._hc_split_sinkhorn_triton  # type: ignore[attr-defined]


def _add_method(scheduler: ModuleType) -> None:
    scheduler.Scheduler.dsv4_benchmark = command


def watch_attention(adapter: Any, watch: AttentionWatch) -> None:
    """Let a watch see which attention runs."""
    watch.ours(adapter)
    here_or_there = adapter._here_or_there

    def watched(layer: Any, name: str, upstream: Any, call: dict[str, Any]) -> Any:
        return here_or_there(layer, name, watch.theirs(name, upstream), call)

    adapter._here_or_there = watched


def command(scheduler: Any, what: str, path: str = "") -> None:
    """A method of sglang's scheduler.

    Args:
        what: ``"compare"`` eager calls from now on; ``"report"`` into ``path``; ``"halve"``
            compressed rows.

    Raises:
        ValueError: another ``what``.
    """
    if what == "compare":
        _attention.comparing = _records.comparing = True
    elif what == "report":
        found = {"attention": _attention.report(), **_records.report()}
        Path(path).write_text(json.dumps(found) + "\n")
    elif what == "halve":
        halve_rows(scheduler.tp_worker.model_runner.model)
    else:
        raise ValueError(f"what must be compare, report or halve, got {what}")
