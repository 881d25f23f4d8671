"""The time of a decode step of a real vLLM engine, from the scheduler's log.

`benchmarks.serve_vllm` measures with it. A step's time is that between two calls of the scheduler,
both of which scheduled one token of each sequence and nothing else; with asynchronous scheduling
this is the time by which the engine advances, not the latency of one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median_high as median
from typing import Any

from benchmarks.engines.serve_work import decode_name, row, timed_again

STEPS = 32


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


def steps_of_prefill(count: int, length: int, budget: int) -> int:
    """About so many steps pass until all prompts are read.

    Decoding sequences take of a step's budget, and an engine may end a piece of a prompt at a
    block's end: four fifths of the budget are assumed to be used.
    """
    return 4 + -(-5 * count * length // (4 * budget))


def new_tokens(count: int, length: int, budget: int) -> int:
    """So many of each sequence that at least `STEPS` steps decode all of them."""
    return STEPS + 4 + (steps_of_prefill(count, length, budget) if count > 1 else 0)


def pure_steps_ms(steps: list[tuple[float, int]], count: int) -> list[float]:
    """The times between decode steps of ``count`` sequences, in ms, the last `STEPS` of them.

    Raises:
        ValueError: there are fewer than 8, for instance because a sequence was preempted.
    """
    last = max((i for i, (_, tokens) in enumerate(steps) if tokens > count), default=-1)
    pure = [i for i in range(last + 1, len(steps)) if steps[i][1] == count]
    times = [1e3 * (steps[b][0] - steps[a][0]) for a, b in pairwise(pure)]
    if len(times) < 8:
        raise ValueError(f"expected at least 8 decode steps of {count} sequences, got {len(times)}")
    return times[-STEPS:]


def step_row(
    log: StepLog,
    count: int,
    length: int,
    budget: int,
    generate: Callable[[int], Any],
    what: str | None = None,
    drafts: int = 0,
) -> dict[str, Any]:
    """A row of a decode step. ``generate(n)``: n tokens of each sequence, for each of which a step
    verifies so many ``drafts``."""
    new = (1 + drafts) * new_tokens(count, length, budget)
    times = timed_again(lambda: pure_steps_ms(log.of(lambda: generate(new)), count * (1 + drafts)))
    spread = {"least_ms": min(times), "steps": len(times)}
    return row(what or decode_name(count, length), "decode", median(times), **spread)


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
