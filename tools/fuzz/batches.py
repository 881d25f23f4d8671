"""Random batches that can be drawn again: what a family declares of them, and how one is run.

A batch follows from one number alone: its operator, its shapes, the contents of its tensors, and
whether it runs by itself, between launches of another family, beside another batch on a second
stream, or as a CUDA graph that is replayed with other contents.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from backend_core.target import Target
from backend_core.testing.numerics import as_bytes

T = TypeVar("T")
MODES = ("alone", "refilled", "interleaved")
"""On any device: one call; a second call on the same tensors with other contents; another family's
call launched in front of this one and this one's once more after it."""
GPU_MODES = (*MODES, "graph", "two streams")
"""On a GPU also: a captured graph, replayed with other contents; two calls at the same time."""
_WEIGHTS = {"alone": 10, "refilled": 3, "interleaved": 3, "graph": 2, "two streams": 2}


class Draw:
    """The random choices of one batch, which are remembered by name for its description."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.made: dict[str, object] = {}

    def choice(self, name: str, values: Sequence[T], weights: Sequence[int] | None = None) -> T:
        """One of ``values``, which must not be empty."""
        found = self._random.choices(values, weights)[0]
        self.made[name] = getattr(found, "name", found)
        return found

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        self.made[name] = found = self._random.randint(low, high)
        return found

    def chance(self, name: str, probability: float) -> bool:
        """True with this probability."""
        self.made[name] = found = self._random.random() < probability
        return found

    def lengths(self, name: str, count: int, edges: Sequence[int], longest: int) -> list[int]:
        """``count`` lengths from 0 to ``longest``: of ``edges`` one in two, else any."""
        found = [
            self._random.choice(edges) if self._random.random() < 0.5 else self._any(longest)
            for _ in range(count)
        ]
        self.made[name] = found
        return found

    def _any(self, longest: int) -> int:
        """Short ones are as likely as long ones."""
        return self._random.randint(0, self._random.randint(1, longest))

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """All values, in any order."""
        return self._random.sample(list(values), len(values))

    def seed(self) -> int:
        """A number for a generator of tensors."""
        return self._random.getrandbits(48)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.made.items())


@dataclass(frozen=True)
class FuzzBatch:
    """One call with its tensors, whose shapes and addresses stay.

    Attributes:
        fill: (seed) gives every input its contents, and every output what must be overwritten or
            must stay as it is. Draws the same contents for the same seed.
        run: makes the call on the current stream and waits for nothing; captured in CUDA graphs.
        error: after ``run``: (error, allowed error) against float64. Raises where something else
            was written than asked for.
        kept: tensors that the call uses and that ``run`` does not hold.
    """

    fill: Callable[[int], None]
    run: Callable[[], object]
    error: Callable[[], tuple[float, float]]
    kept: object = None


FuzzCase = Callable[[Draw, Target, torch.device], FuzzBatch]
"""Draws a batch of one operator: shapes, layouts, path, metadata. Contents come with ``fill``."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one batch.

    Attributes:
        status: ``"ok"``, ``"wrong"`` (compared, and not right) or ``"failed"`` (raised).
        used: error over allowed error, infinite where something was written that must stay.
        message: what is wrong, and the batch in words; ``None`` where nothing is.
    """

    operator: str
    status: str
    used: float
    message: str | None


_ONE_ROW = 2.0
"""Factor of the tolerance for one output row alone."""


def run_batch(
    seed: int,
    cases: Mapping[str, FuzzCase],
    others: Mapping[str, FuzzCase],
    target: Target,
    device: torch.device,
) -> Outcome:
    """Draw batch number ``seed`` of a family, run it and compare it.

    Args:
        cases: of the family, by operator.
        others: cases of any family, by family and operator, whose calls may come in between.
    """
    draw = Draw(seed)
    operator = "none"
    try:
        operator = draw.choice("operator", tuple(cases))
        modes = GPU_MODES if device.type == "cuda" else MODES
        mode = draw.choice("mode", modes, [_WEIGHTS[name] for name in modes])
        batch = cases[operator](draw, target, device)
        batches = [batch]
        if mode in ("interleaved", "two streams"):
            batches.append(_companion(draw, others, target, device))
        used = _RUNS[mode](draw, batches, device)
    except MismatchError as error:
        return Outcome(operator, "wrong", float("inf"), f"{error} ({draw})")
    except Exception as error:  # whatever a compiler, a driver or a contract raises is the result
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return Outcome(operator, "failed", float("inf"), f"{message} ({draw})")
    if used <= 1.0:  # a NaN is not
        return Outcome(operator, "ok", used, None)
    return Outcome(operator, "wrong", used, f"error is {used:.3g} times what is allowed ({draw})")


class MismatchError(Exception):
    """A batch changed what it had to leave alone, or its result is not of the kind it must be."""


def expect_untouched(what: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Raises `MismatchError` where a byte differs; ``what`` begins the sentence."""
    if not torch.equal(as_bytes(before), as_bytes(after)):
        raise MismatchError(f"{what} was written and must stay as it was")


def worst(*pairs: tuple[float, float]) -> tuple[float, float]:
    """Of (error, allowed) the one that uses most of what is allowed; NaN counts as most."""
    return max(pairs, key=lambda pair: pair[0] / pair[1] if pair[0] == pair[0] else float("inf"))


def output_error(got: torch.Tensor, want: torch.Tensor, allowed: float) -> tuple[float, float]:
    """The worst relative L2 of outputs ``[..., D]``: of all rows, and of one alone."""
    if not want.numel():
        return 0.0, allowed
    difference = (got.double() - want).square().sum(-1)
    whole = want.square().sum(-1)
    # the sum of a row's values may cancel: then it is compared with a tenth of what rows are
    floor = torch.maximum(whole, 0.01 * whole.mean())
    row = torch.where(difference == 0.0, 0.0, (difference / floor).sqrt()).max() / _ONE_ROW
    total = (difference.sum() / whole.sum().clamp(min=1e-60)).sqrt()
    found = torch.stack([row, total]).nan_to_num(math.inf, math.inf)
    return float(found.max()), allowed


def _companion(
    draw: Draw, others: Mapping[str, FuzzCase], target: Target, device: torch.device
) -> FuzzBatch:
    """A batch of any family, to run in front of the one under test or beside it."""
    name = draw.choice("beside", tuple(others))
    inner = Draw(draw.seed())
    batch = others[name](inner, target, device)
    draw.made["which has"] = f"[{inner}]"
    return batch


def _used(batches: Sequence[FuzzBatch]) -> float:
    """Of what is allowed, the share that the batch under test uses.

    Raises:
        MismatchError: it is right, and another one is not.
    """
    used = []
    for batch in batches:
        error, allowed = batch.error()
        ratio = error / allowed
        used.append(ratio if ratio == ratio else float("inf"))
    if used[0] <= 1.0 < max(used):
        raise MismatchError(f"error of the call beside it is {max(used):.3g} times what is allowed")
    return used[0]


def _alone(draw: Draw, batches: list[FuzzBatch], device: torch.device) -> float:
    batches[0].fill(draw.seed())
    batches[0].run()
    return _used(batches)


def _refilled(draw: Draw, batches: list[FuzzBatch], device: torch.device) -> float:
    return max(_alone(draw, batches, device) for _ in range(2))


def _interleaved(draw: Draw, batches: list[FuzzBatch], device: torch.device) -> float:
    mine, other = batches
    used = 0.0
    for order in ((other, mine), (mine, other)):
        for batch in order:
            batch.fill(draw.seed())
        for batch in order:  # no wait in between
            batch.run()
        used = max(used, _used(batches))
    return used


def _graph(draw: Draw, batches: list[FuzzBatch], device: torch.device) -> float:
    (batch,) = batches
    stream = _side_streams(device)[0]
    batch.fill(draw.seed())
    with _on(stream, device):
        batch.run()  # compiles and loads
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        graph.capture_begin()  # torch.cuda.graph also collects garbage, which takes longer
        try:
            batch.run()
        finally:
            graph.capture_end()
    used = 0.0
    for _ in range(2):
        batch.fill(draw.seed())
        graph.replay()
        used = max(used, _used(batches))
    torch.cuda.synchronize(device)
    return used


def _two_streams(draw: Draw, batches: list[FuzzBatch], device: torch.device) -> float:
    for batch in batches:
        batch.fill(draw.seed())
    torch.cuda.synchronize(device)
    for stream, batch in zip(_side_streams(device), batches, strict=True):
        with torch.cuda.stream(stream):
            batch.run()
    torch.cuda.synchronize(device)
    return _used(batches)


_RUNS: Mapping[str, Callable[[Draw, list[FuzzBatch], torch.device], float]] = {
    "alone": _alone,
    "refilled": _refilled,
    "interleaved": _interleaved,
    "graph": _graph,
    "two streams": _two_streams,
}
_STREAMS: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}


def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    if device not in _STREAMS:
        first, second = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        _STREAMS[device] = (first, second)
    return _STREAMS[device]


@contextmanager
def _on(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """On another stream, after and before what the current one does."""
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
