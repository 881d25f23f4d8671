"""LDS and global memory: bytes with bounds, and a record of which wave touched which byte.

Two accesses to one byte from different waves, one of them a write, must have a barrier between
them; from different workgroups they must not happen at all. Writes of equal bytes are no conflict:
Triton lets several waves store a value that all of them hold.

Operations that a wave has not waited for when it reaches a barrier count as after it, as LLVM's
memory model of GFX942 has it ("User Guide for AMDGPU Backend"; gfx950 is compiled by the same
rules). LDS operations of different waves may be reordered among one another and need
``s_waitcnt lgkmcnt(0)``. Vector memory operations of the waves of a workgroup need nothing: they
go through one L1, and a release at workgroup scope waits with ``vmcnt(0)`` in tgsplit mode alone,
where such waves may be on different compute units. So a store that was not waited for is visible
after the barrier. A kernel in tgsplit mode is refused (``program``), and reads of such stores are
counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tools.amdgcn.errors import FaultError, RaceError

if TYPE_CHECKING:
    from tools.amdgcn.wave import Wave

_SPACING = 1 << 34


@dataclass(eq=False)
class Access:
    """The bytes that one operation touched; ``is_waited`` once its wave has waited for it."""

    tracker: Tracker
    index: np.ndarray
    is_write: bool
    is_waited: bool = False


class Tracker:
    """For each byte of one array the last write and the reads since, by wave and by barrier.

    A wave's identity is ``64 * workgroup + wave``, a time the number of barriers that its workgroup
    has passed.
    """

    def __init__(self, size: int, what: str) -> None:
        self.what = what
        self.writer = np.full(size, -1, np.int32)
        self.write_time = np.zeros(size, np.int32)
        self.is_loose = np.zeros(size, np.bool_)
        self.reader = np.full(size, -1, np.int32)
        self.read_time = np.zeros(size, np.int32)
        self.has_readers = np.zeros(size, np.bool_)

    def read(self, wave: Wave, index: np.ndarray) -> Access:
        me, time = wave.workgroup.identity(wave), wave.workgroup.time
        writer = self.writer[index]
        foreign = (writer >= 0) & (writer != me)
        if foreign.any():
            same_group = writer >> 6 == me >> 6
            early = foreign & ~(same_group & (self.write_time[index] < time))
            if early.any():
                self._refuse("reads", index, early, writer)
            wave.workgroup.unwaited_reads += int((foreign & self.is_loose[index]).any())
        self._mark_read(index, me, time)
        return Access(self, index, False)

    def write(self, wave: Wave, index: np.ndarray, old: np.ndarray, new: np.ndarray) -> Access:
        me, time = wave.workgroup.identity(wave), wave.workgroup.time
        reader, writer = self.reader[index], self.writer[index]
        others = (reader >= 0) & ((reader != me) | self.has_readers[index])
        early = others & ~((reader >> 6 == me >> 6) & (self.read_time[index] < time))
        if early.any():
            self._refuse("overwrites what was read by", index, early, reader)
        foreign = (writer >= 0) & (writer != me)
        if foreign.any():
            ordered = (writer >> 6 == me >> 6) & (self.write_time[index] < time)
            early = foreign & ~ordered & (old != new)
            if early.any():
                self._refuse("overwrites", index, early, writer)
        self._mark_write(index, me, time)
        return Access(self, index, True)

    def carry_over(self, wave: Wave, access: Access, is_ordered: bool) -> None:
        """An operation is still in flight at a barrier that is now passed."""
        me, time = wave.workgroup.identity(wave), wave.workgroup.time
        if is_ordered:
            if access.is_write:
                self.is_loose[access.index] = True
        elif access.is_write:
            self._mark_write(access.index, me, time)
        else:
            self._mark_read(access.index, me, time)

    def _mark_read(self, index: np.ndarray, me: int, time: int) -> None:
        reader = self.reader[index]
        shared = (reader >= 0) & (reader != me)
        current = (self.read_time[index] == time) | (reader >> 6 != me >> 6)
        self.has_readers[index] = shared & current | (self.has_readers[index] & current)
        self.reader[index] = me
        self.read_time[index] = time

    def _mark_write(self, index: np.ndarray, me: int, time: int) -> None:
        self.writer[index] = me
        self.write_time[index] = time
        self.is_loose[index] = False

    def _refuse(self, verb: str, index: np.ndarray, which: np.ndarray, other: np.ndarray) -> None:
        at = int(np.argmax(which))
        whose = int(other[at])
        raise RaceError(
            f"{verb} byte {int(index[at])} of {self.what}, which wave {whose & 63} of workgroup "
            f"{whose >> 6} touched with no barrier in between"
        )


@dataclass(eq=False)
class Region:
    """One array of global memory."""

    base: int
    data: np.ndarray
    tracker: Tracker | None


@dataclass
class GlobalMemory:
    """Named byte arrays far apart in one 64-bit address space; no access may leave its array."""

    regions: list[Region] = field(default_factory=list)

    def add(self, data: np.ndarray, what: str, *, tracked: bool = True) -> int:
        """Place an array of bytes; returns its address."""
        base = _SPACING * (len(self.regions) + 1)
        self.regions.append(Region(base, data, Tracker(data.size, what) if tracked else None))
        return base

    def find(self, address: int, size: int) -> Region:
        number = address // _SPACING - 1
        if 0 <= number < len(self.regions):
            region = self.regions[number]
            if address + size <= region.base + region.data.size:
                return region
        raise FaultError(f"{size} bytes at {address:#x} are outside every tensor")

    def split(self, addresses: np.ndarray, size: int) -> list[tuple[Region, np.ndarray]]:
        """Regions with the places in ``addresses`` that lie in them."""
        numbers = addresses >> 34
        found = []
        for number in np.unique(numbers):
            where = np.flatnonzero(numbers == number)
            region = self.find(int(addresses[where].max()), size)
            found.append((region, where))
        return found


class Lds:
    """The local memory of one workgroup."""

    def __init__(self, size: int) -> None:
        self.data = np.full(size, 0xA5, np.uint8)
        self.tracker = Tracker(size, "LDS")

    def check(self, addresses: np.ndarray, size: int) -> None:
        if addresses.size and (addresses.max() + size > self.data.size or addresses.min() < 0):
            at, limit = int(addresses.max()), self.data.size
            raise FaultError(f"{size} bytes at {at} are outside the {limit} bytes of LDS")


def spread(addresses: np.ndarray, size: int) -> np.ndarray:
    """``[n * size]``: the index of each byte of accesses of ``size`` bytes."""
    return (addresses[:, None] + np.arange(size)).ravel()
