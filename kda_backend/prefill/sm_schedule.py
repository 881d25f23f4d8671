"""How a prefill on Hopper shares the multiprocessors between its two stages.

What a path table's row says of their times, the layouts that are possible, and an estimate of each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from kda_backend.launch_params import PrefillCostModel


class IntraCosts(NamedTuple):
    """The intra stage with so many blocks on one multiprocessor; times in ns.

    Attributes:
        blocks: on one multiprocessor; each makes one tile at a time.
        tile_ns: a multiprocessor's time for a tile, its blocks together.
        alone_ns: time of the last tiles, when there is less than one for each block.
    """

    blocks: int
    tile_ns: int
    alone_ns: int


class ScanCosts(NamedTuple):
    """The scan in one of its forms; times in ns.

    Attributes:
        split: the output of each half of the value rows has a block of its own.
        start_ns: a task's time beside its steps.
        step_ns: time of a chunk.
    """

    split: bool
    start_ns: int
    step_ns: int

    @property
    def blocks(self) -> int:
        """Blocks for a sequence and head, each on a multiprocessor of its own."""
        return 4 if self.split else 1

    def task_ns(self, chunks: int) -> int:
        return self.start_ns + chunks * self.step_ns


class Costs(NamedTuple):
    """What the layout of a launch is estimated from: the path's parameters, times in ns.

    Attributes:
        num_sms: multiprocessors of the device.
        intra: the choices of the intra stage.
        scan: those of the scan.
        fetch_ns: a tile's way from memory to the scan, when all multiprocessors fetch.
    """

    num_sms: int
    intra: tuple[IntraCosts, ...]
    scan: tuple[ScanCosts, ...]
    fetch_ns: int


def costs_of(model: PrefillCostModel, num_sms: int) -> Costs:
    """The costs in a table's ``[cost_model]``."""
    return Costs(
        num_sms,
        (
            IntraCosts(2, model.intra_2_tile_ns, model.intra_2_alone_ns),
            IntraCosts(4, model.intra_4_tile_ns, model.intra_4_alone_ns),
        ),
        (
            ScanCosts(False, model.scan_start_ns, model.scan_step_ns),
            ScanCosts(True, model.split_start_ns, model.split_step_ns),
        ),
        model.fetch_ns,
    )


class Layout(NamedTuple):
    """How one call shares the multiprocessors.

    Attributes:
        per_sm: intra blocks on one multiprocessor.
        split: the form of the scan.
        scan_blocks: each occupies a whole multiprocessor; tasks beyond their number come in turn.
        intra_blocks: in all.
        first_scan_sm: the multiprocessors from this one on are left to the scan,
        limit: when every intra block there has made so many tiles.
        in_turn: tiles are made for one sequence after the other, not for all abreast.
    """

    per_sm: int
    split: bool
    scan_blocks: int
    intra_blocks: int
    first_scan_sm: int
    limit: int
    in_turn: bool


class Work(NamedTuple):
    """What a call has to do.

    Attributes:
        tiles: chunks times value heads.
        tasks: sequences times value heads.
        chunks: of the longest sequence.
        long_tasks: those of more than half as many chunks.
    """

    tiles: int
    tasks: int
    chunks: int
    long_tasks: int


@functools.lru_cache(maxsize=4096)
def lay_out(costs: Costs, work: Work) -> Layout:
    """The layout with the least estimated time."""
    return min(layouts(costs, work))[1]


def layouts(costs: Costs, work: Work) -> Iterator[tuple[float, Layout]]:
    """The layouts worth a thought, each with its estimated time in ns."""
    for intra, scan in itertools.product(costs.intra, costs.scan):
        yield _tiles_first(costs, work, intra, scan)
        yield from _long_tasks_beside(costs, work, intra, scan)
        if not scan.split:
            yield from _tasks_in_turn(costs, work, intra, scan)


def _tiles_first(
    costs: Costs, work: Work, intra: IntraCosts, scan: ScanCosts
) -> tuple[float, Layout]:
    """All tiles, then the scan."""
    sms, per_sm = costs.num_sms, intra.blocks
    rounds, rest = divmod(-(-work.tiles // sms), per_sm)
    intra_ns = rounds * per_sm * intra.tile_ns
    intra_ns += max(intra.alone_ns, rest * intra.tile_ns) if rest else 0
    waves = -(-work.long_tasks * scan.blocks // sms)
    scan_ns = waves * scan.task_ns(work.chunks) + _short_ns(work, scan) / sms
    scan_ns = max(scan_ns, work.tiles * costs.fetch_ns)
    blocks = sms if work.tiles <= sms else per_sm * sms
    layout = Layout(per_sm, scan.split, _scan_blocks(costs, work, scan), blocks, sms, 0, False)
    return intra_ns + scan_ns, layout


def _long_tasks_beside(
    costs: Costs, work: Work, intra: IntraCosts, scan: ScanCosts
) -> Iterator[tuple[float, Layout]]:
    """The long tasks beside the tiles, on multiprocessors of their own; the others behind them."""
    per_sm, tile_ns = intra.blocks, intra.tile_ns
    at_once = per_sm * costs.num_sms
    others = costs.num_sms - work.long_tasks * scan.blocks
    if others <= 0:
        return
    short_tasks = work.tasks - work.long_tasks
    last_ns: float = scan.start_ns
    if short_tasks:
        last_ns = max(_short_ns(work, scan) / others, _short_steps(work) * costs.fetch_ns)
    long_ns = scan.task_ns(work.chunks)
    beside = others * max(0.0, long_ns - last_ns) / tile_ns
    most = max(0, int((work.tiles - beside) // at_once))
    for limit in (most, most + 1):
        head_ns = limit * per_sm * tile_ns
        rest_ns = max(0, work.tiles - limit * at_once) * tile_ns / others
        # no tile is there before the first round is over
        first_ns = max(intra.alone_ns, min(per_sm, -(-work.tiles // others)) * tile_ns)
        start_ns = first_ns if limit == 0 else 0
        ns = head_ns + max(start_ns + long_ns, rest_ns + last_ns)
        blocks = costs.num_sms if work.tiles <= others else at_once
        scan_blocks = _scan_blocks(costs, work, scan)
        yield ns, Layout(per_sm, scan.split, scan_blocks, blocks, others, limit, False)


def _tasks_in_turn(
    costs: Costs, work: Work, intra: IntraCosts, scan: ScanCosts
) -> Iterator[tuple[float, Layout]]:
    """Tiles of one sequence after the other; some multiprocessors take its tasks as they come."""
    sms, at_once = costs.num_sms, intra.blocks * costs.num_sms
    if work.tiles <= at_once:
        return
    work_ns = work.tasks * scan.start_ns + work.tiles * scan.step_ns
    first_ns = intra.blocks * intra.tile_ns  # nothing can be scanned before, so all make tiles
    short_tasks = work.tasks - work.long_tasks
    last_chunks = -(-_short_steps(work) // short_tasks) if short_tasks else work.chunks
    last_task_ns, long_ns = scan.task_ns(last_chunks), scan.task_ns(work.chunks)
    scan_blocks = _scan_blocks(costs, work, scan)
    others_ns = (work.tiles - at_once) * intra.tile_ns
    behind_ns = max(work_ns / sms, work.tiles * costs.fetch_ns)  # the whole scan behind all tiles
    for workers in range(4, min(work.tasks, sms // 2), 4):
        rest_ns = others_ns / (sms - workers)
        left = 1 - workers * rest_ns / work_ns  # of the scan, when all tiles are there
        last_ns = max(last_task_ns, left * behind_ns)
        layout = Layout(intra.blocks, False, scan_blocks, at_once, sms - workers, 1, True)
        yield first_ns + max(rest_ns + last_ns, long_ns), layout


def _short_steps(work: Work) -> int:
    """Chunks of the tasks that are not long, if the long ones are equal."""
    return max(0, work.tiles - work.long_tasks * work.chunks)


def _short_ns(work: Work, scan: ScanCosts) -> int:
    """What the tasks that are not long take, in ns of one multiprocessor."""
    steps = _short_steps(work)
    return scan.blocks * ((work.tasks - work.long_tasks) * scan.start_ns + steps * scan.step_ns)


def _scan_blocks(costs: Costs, work: Work, scan: ScanCosts) -> int:
    return work.tasks * scan.blocks if scan.split else min(work.tasks, costs.num_sms)
