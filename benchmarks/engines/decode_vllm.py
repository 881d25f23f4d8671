"""The log of a vLLM engine's scheduler, and what its drafts take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class StepLog:
    """When the engine scheduled how many tokens. ``llm`` runs its engine in this process.

    Attributes:
        most_running: requests that ran at a time since the last call of `of` began.
    """

    def __init__(self, llm: Any) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule
        self.steps: list[tuple[float, int]] = []
        self.most_running = 0

        def logged(*args: Any, **options: Any) -> Any:
            found = schedule(*args, **options)
            self.steps.append((time.perf_counter(), found.total_num_scheduled_tokens))
            self.most_running = max(self.most_running, len(found.num_scheduled_tokens))
            return found

        scheduler.schedule = logged

    def of(self, call: Callable[[], Any]) -> list[tuple[float, int]]:
        """The steps of a call that scheduled anything: (time in s, tokens)."""
        self.steps.clear()
        self.most_running = 0
        call()
        return [(at, tokens) for at, tokens in self.steps if tokens]


def draft_memory_kib(worker: Any) -> dict[str, float]:
    """Memory of a request for its drafts in all KDA layers of a rank: blocks of the cache for
    states, and records."""
    runner = worker.model_runner
    groups = runner.kv_cache_config.kv_cache_groups
    blocks = sum(
        getattr(group.kv_cache_spec, "num_speculative_blocks", 0)
        * group.kv_cache_spec.page_size_bytes
        * len(group.layer_names)
        for group in groups
    )
    kept = [getattr(layer, "recoverssm_records", None) for layer in runner.model.modules()]
    rows = runner.vllm_config.scheduler_config.max_num_seqs
    records = sum(one.correction.nbytes + one.key_gate.nbytes for one in kept if one is not None)
    return {"blocks_kib": blocks / 1024, "records_kib": records / rows / 1024}
