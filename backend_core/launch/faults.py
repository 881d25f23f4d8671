"""Why a kernel gave up: a record in host memory, which outlives the GPU's context.

A kernel that waits for another one does so for a bounded time. Then it writes here what it waited
for, and traps. The trap ends everything that this process does on the GPU, since a result that is
not there cannot be made up, and the next synchronisation says no more than "unspecified launch
failure". The record's sentence is added to the error of our next launch, and logged at the end of
the process.
"""

from __future__ import annotations

import atexit
import functools
import logging
from collections.abc import Mapping, Sequence

import torch

logger = logging.getLogger("kda_dsv4")

WORDS = 8
_kept: dict[str, FaultRecord] = {}


class FaultRecord:
    """The record of one group of kernels, for all devices of the process.

    Attributes:
        address: of its words, which kernels write: ``code``, ``index``, ``seen``, ``expected``.
    """

    def __init__(self, sentences: Mapping[int, str]) -> None:
        """``sentences``: by code, with ``{index}``, ``{seen}`` and ``{expected}``."""
        self._sentences = sentences
        pinned = torch.cuda.is_available()
        self.words = torch.zeros(WORDS, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.address = self.words.data_ptr()

    def sentence(self) -> str | None:
        """The record of a kernel that gave up, in words; ``None`` if none did."""
        code, index, seen, expected = (x & 0xFFFFFFFF for x in self.words[:4].tolist())
        if code == 0:
            return None
        text = self._sentences.get(code, "a kernel gave up for a reason of number {code}")
        return text.format(code=code, index=index, seen=seen, expected=expected)


def record(name: str, sentences: Mapping[int, str]) -> FaultRecord:
    """The process's record of that name, made at its first use."""
    if name not in _kept:
        _tell_at_exit()
        _kept[name] = FaultRecord(sentences)
    return _kept[name]


def sentences() -> Sequence[str]:
    """Sentences of all records in which a kernel has written."""
    return [text for kept in _kept.values() if (text := kept.sentence()) is not None]


def with_fault(message: str) -> str:
    """``message``, and why a kernel gave up, where one did."""
    return ": ".join((message, *sentences()))


@functools.cache
def _tell_at_exit() -> None:
    atexit.register(_tell)


def _tell() -> None:
    for text in sentences():
        logger.error("the GPU's work was ended: %s", text)
