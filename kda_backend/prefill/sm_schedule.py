"""How a prefill on Hopper shares the SMs between its two stages.

The intra stage makes tiles, one per chunk and value head, in any order. The scan runs one task per
sequence and value head, whose chunks follow one another; it can start on a chunk as soon as that
chunk's tile lies in memory. A scan CTA occupies a whole SM. There are three strategies, and a call
takes the schedule with the least estimated time.

The estimates come from a `CostModel`, whose constants are fitted so that the choice is best on a
sweep (benchmarks/sweep_kda_prefill.py); they are not times of stages by themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class IntraCost(NamedTuple):
    """The intra stage with ``ctas_per_sm`` CTAs on each SM; times in ns.

    Attributes:
        ctas_per_sm: each makes one tile at a time.
        tile_ns: an SM's time per tile, its CTAs together.
        alone_ns: time of the last tiles, when there is less than one per CTA.
    """

    ctas_per_sm: int
    tile_ns: int
    alone_ns: int


class ScanCost(NamedTuple):
    """One of the two scan kernels; times in ns.

    Attributes:
        split: scan_split.cu, where each half of the value rows has two CTAs.
        start_ns: time per task, without its steps.
        step_ns: time per chunk.
    """

    split: bool
    start_ns: int
    step_ns: int

    @property
    def ctas_per_task(self) -> int:
        """Each on an SM of its own."""
        return 4 if self.split else 1

    def task_ns(self, chunks: int) -> int:
        return self.start_ns + chunks * self.step_ns


class CostModel(NamedTuple):
    """The basis of the estimates of schedules; times in ns.

    The numbers are fitted to benchmarks/results/kda_prefill_sweep_h200.json, not measured one by
    one.

    Attributes:
        num_sms: SMs of the device.
        intra: the choices of the intra stage.
        scan: those of the scan.
        fetch_ns: time per tile from memory to the scan, when all SMs fetch.
    """

    num_sms: int
    intra: tuple[IntraCost, ...] = (IntraCost(2, 7618, 13523), IntraCost(4, 4927, 17000))
    scan: tuple[ScanCost, ...] = (ScanCost(False, 7810, 1708), ScanCost(True, 4775, 930))
    fetch_ns: int = 80


class PrefillShape(NamedTuple):
    """The work of a call.

    Attributes:
        tiles: chunks times value heads.
        tasks: sequences times value heads.
        chunks: of the longest sequence.
        long_tasks: tasks of more than half as many chunks.
    """

    tiles: int
    tasks: int
    chunks: int
    long_tasks: int

    @property
    def short_tasks(self) -> int:
        return self.tasks - self.long_tasks

    @property
    def short_steps(self) -> int:
        """Chunks of the tasks that are not long, if the long ones are equal."""
        return max(0, self.tiles - self.long_tasks * self.chunks)

    def short_ns(self, scan: ScanCost) -> int:
        """The time of the tasks that are not long, in ns of one SM."""
        steps_ns = self.short_steps * scan.step_ns
        return scan.ctas_per_task * (self.short_tasks * scan.start_ns + steps_ns)

    def scan_ctas(self, scan: ScanCost, num_sms: int) -> int:
        return self.tasks * scan.ctas_per_task if scan.split else min(self.tasks, num_sms)


class Schedule(NamedTuple):
    """How one call shares the SMs.

    Attributes:
        intra_ctas_per_sm: intra CTAs that fit on one SM.
        split: the scan is scan_split.cu.
        scan_ctas: each occupies a whole SM; tasks beyond their number are taken one after another.
        intra_ctas: in all.
        first_scan_sm: the SMs from this one on are reserved for the scan.
        reserved_sm_tile_cap: tiles that an intra CTA on a reserved SM makes before it ends.
        sequence_major: tiles are made for one sequence after the other, not chunk by chunk for all.
    """

    intra_ctas_per_sm: int
    split: bool
    scan_ctas: int
    intra_ctas: int
    first_scan_sm: int
    reserved_sm_tile_cap: int
    sequence_major: bool


def choose_schedule(model: CostModel, shape: PrefillShape) -> Schedule:
    """The schedule with the least estimated time."""
    return min(schedules(model, shape))[1]


def schedules(model: CostModel, shape: PrefillShape) -> Iterator[tuple[float, Schedule]]:
    """Candidate schedules, each with its estimated time in ns."""
    for intra, scan in itertools.product(model.intra, model.scan):
        yield tiles_first(model, shape, intra, scan)
        yield from long_sequences_concurrent(model, shape, intra, scan)
        if not scan.split:
            yield from sequence_major(model, shape, intra, scan)


def tiles_first(
    model: CostModel, shape: PrefillShape, intra: IntraCost, scan: ScanCost
) -> tuple[float, Schedule]:
    """TilesFirst: all tiles on all SMs, then the scan.

    ::

        time ------->
        SM 0      tile tile tile | scan of task 0
        SM 1      tile tile tile | scan of task 1
        SM 2      tile tile      | scan of task 2
    """
    sms, per_sm = model.num_sms, intra.ctas_per_sm
    rounds, rest = divmod(-(-shape.tiles // sms), per_sm)
    intra_ns = rounds * per_sm * intra.tile_ns
    intra_ns += max(intra.alone_ns, rest * intra.tile_ns) if rest else 0
    waves = -(-shape.long_tasks * scan.ctas_per_task // sms)
    scan_ns = waves * scan.task_ns(shape.chunks) + shape.short_ns(scan) / sms
    scan_ns = max(scan_ns, shape.tiles * model.fetch_ns)
    intra_ctas = sms if shape.tiles <= sms else per_sm * sms
    scan_ctas = shape.scan_ctas(scan, sms)
    return intra_ns + scan_ns, Schedule(per_sm, scan.split, scan_ctas, intra_ctas, sms, 0, False)


def long_sequences_concurrent(
    model: CostModel, shape: PrefillShape, intra: IntraCost, scan: ScanCost
) -> Iterator[tuple[float, Schedule]]:
    """LongSequencesConcurrent: the longest sequences' tasks on reserved SMs while the others make
    tiles; the short tasks follow the tiles. Here with two reserved SMs and a cap of one tile::

        time ------->
        SM 0      tile tile tile tile tile | short tasks
        SM 1      tile tile tile tile tile | short tasks
        SM 2      tile | scan of long task 0 ----------------
        SM 3      tile | scan of long task 1 ----------------
    """
    per_sm, tile_ns = intra.ctas_per_sm, intra.tile_ns
    at_once = per_sm * model.num_sms
    others = model.num_sms - shape.long_tasks * scan.ctas_per_task
    if others <= 0:
        return
    last_ns: float = scan.start_ns
    if shape.short_tasks:
        last_ns = max(shape.short_ns(scan) / others, shape.short_steps * model.fetch_ns)
    long_ns = scan.task_ns(shape.chunks)
    # the cap with which tiles and short tasks take as long as the long tasks
    concurrent = others * max(0.0, long_ns - last_ns) / tile_ns
    balanced = max(0, int((shape.tiles - concurrent) // at_once))
    for cap in (balanced, balanced + 1):
        head_ns = cap * per_sm * tile_ns
        rest_ns = max(0, shape.tiles - cap * at_once) * tile_ns / others
        # no tile is there before the first round is over
        first_ns = max(intra.alone_ns, min(per_sm, -(-shape.tiles // others)) * tile_ns)
        start_ns = first_ns if cap == 0 else 0
        ns = head_ns + max(start_ns + long_ns, rest_ns + last_ns)
        intra_ctas = model.num_sms if shape.tiles <= others else at_once
        scan_ctas = shape.scan_ctas(scan, model.num_sms)
        yield ns, Schedule(per_sm, scan.split, scan_ctas, intra_ctas, others, cap, False)


def sequence_major(
    model: CostModel, shape: PrefillShape, intra: IntraCost, scan: ScanCost
) -> Iterator[tuple[float, Schedule]]:
    """SequenceMajor: tiles of one sequence after the other; reserved SMs scan tasks as their tiles
    come, and in the end all do::

        time ------->
        SM 0      tile tile tile tile tile | task 5 | task 8
        SM 1      tile tile tile tile tile | task 6 | task 9
        SM 2      tile | task 0 | task 2 | task 4 | task 7
        SM 3      tile | task 1 | task 3 | ...
    """
    sms, at_once = model.num_sms, intra.ctas_per_sm * model.num_sms
    if shape.tiles <= at_once:
        return
    scan_ns = shape.tasks * scan.start_ns + shape.tiles * scan.step_ns  # of one SM
    first_ns = intra.ctas_per_sm * intra.tile_ns  # nothing can be scanned before, so all make tiles
    short_tasks = shape.short_tasks
    last_chunks = -(-shape.short_steps // short_tasks) if short_tasks else shape.chunks
    last_task_ns, long_ns = scan.task_ns(last_chunks), scan.task_ns(shape.chunks)
    scan_ctas = shape.scan_ctas(scan, sms)
    others_ns = (shape.tiles - at_once) * intra.tile_ns
    after_tiles_ns = max(scan_ns / sms, shape.tiles * model.fetch_ns)  # were all of it left
    for reserved in range(4, min(shape.tasks, sms // 2), 4):
        rest_ns = others_ns / (sms - reserved)
        remaining = 1 - reserved * rest_ns / scan_ns  # of the scan, when all tiles are there
        last_ns = max(last_task_ns, remaining * after_tiles_ns)
        schedule = Schedule(
            intra.ctas_per_sm, False, scan_ctas, at_once, sms - reserved, 1, sequence_major=True
        )
        yield first_ns + max(rest_ns + last_ns, long_ns), schedule
