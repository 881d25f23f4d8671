"""Changes to sglang's scheduler process for `dsv4_sglang_side`; `install` is the entry point.

Weights are drawn as sglang initialises its dummies. Queries of fewer than 64 heads are padded to
64, as sglang does where ranks share the heads, since FlashMLA takes no fewer. mHC's Sinkhorn step,
which TileLang compiles, is sglang's own in Triton on every side; the rest of mHC has torch
functions of sglang's, which environment variables choose. With the flag, attention and compressors
are watched. The scheduler gets a method ``dsv4_benchmark``, which the engine's ``collective_rpc``
calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from backend_core.engines.after_import import after_import
from benchmarks.engines.dsv4_attention import FLASHMLA_HEADS, AttentionWatch
from benchmarks.engines.dsv4_model import draw_weights, halve_rows
from benchmarks.engines.dsv4_sglang_watch import RecordWatch

_attention, _records = AttentionWatch(), RecordWatch()


def install() -> None:
    """In each process of the engine; acts in the one that loads the model."""
    after_import("sglang.srt.model_loader.loader", _draw)
    after_import("sglang.srt.models.deepseek_v4", _pad_heads)
    after_import("sglang.kernels.ops.layernorm.mhc", _without_tilelang)
    after_import("sglang.srt.managers.scheduler", _add_method)
    after_import("mla_backend.engines.sglang_sparse", lambda it: watch_attention(it, _attention))
    after_import("dsv4_backend.engines.sglang_compressor", _records.watch_v4)
    after_import("dsv4_backend.engines.sglang_v41", _records.watch_v41)


def _draw(loader: ModuleType) -> None:
    loader.initialize_dummy_weights = draw_weights  # type: ignore[attr-defined]


def _pad_heads(model: ModuleType) -> None:
    attention: Any = model.MqaAttentionBase
    sink_of = attention._local_attn_sink

    def padded_sink(self: Any, kernel_num_heads: int) -> torch.Tensor:
        sink: torch.Tensor = sink_of(self, kernel_num_heads)
        return torch.nn.functional.pad(sink, (0, kernel_num_heads - sink.shape[0]))

    attention._kernel_num_heads = lambda self, num_tokens: max(FLASHMLA_HEADS, self.n_local_heads)
    attention._local_attn_sink = padded_sink


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
