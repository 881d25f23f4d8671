"""The time of a decode step of a real engine, from its scheduler's log.

`benchmarks.serve_vllm` and `benchmarks.serve_sglang` measure with it. A step's time is that between
two calls of the scheduler, both of which scheduled one token of each sequence and nothing else;
where it runs ahead of the GPU this is the time by which the engine advances, not the latency of one
step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median_high as median
from typing import Any, Protocol

from benchmarks.engines.serve_work import row, timed_again

STEPS = 32


class StepLog(Protocol):
    """When an engine scheduled how many tokens."""

    def of(self, call: Callable[[], Any]) -> list[tuple[float, int]]:
        """The steps of a call that scheduled anything: (time in s, tokens)."""


def steps_of_prefill(count: int, length: int, budget: int) -> int:
    """About so many steps pass until all prompts are read.

    Decoding sequences take of a step's budget, and an engine may end a piece of a prompt at a
    block's end: four fifths of the budget are assumed to be used.
    """
    return 4 + -(-5 * count * length // (4 * budget))


def new_tokens(count: int, length: int, budget: int, drafts: int = 0) -> int:
    """So many of each sequence that at least `STEPS` steps decode all of them, where a step writes
    up to ``drafts`` tokens more of each."""
    steps = STEPS + 4 + (steps_of_prefill(count, length, budget) if count > 1 else 0)
    return (1 + drafts) * steps


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
    generate: Callable[[], Any],
    what: str,
    drafts: int = 0,
) -> dict[str, Any]:
    """A row of a decode step: the median over several runs of ``generate``, of ``count`` sequences,
    for each of which a step verifies so many ``drafts``."""
    tokens = count * (1 + drafts)
    times = timed_again(lambda: pure_steps_ms(log.of(generate), tokens))
    return row(what, "decode", median(times), least_ms=min(times), steps=len(times))
