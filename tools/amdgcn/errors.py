"""The errors of a program that is executed."""

from __future__ import annotations


class ExecutionError(Exception):
    """The program did what a GPU would not do, or not do reliably."""


class UnmodelledError(ExecutionError):
    """An instruction, a form of one, or a modifier that this interpreter does not know."""


class HazardError(ExecutionError):
    """A register was used too early: its load was not waited for, or too few wait states passed."""


class RaceError(ExecutionError):
    """Two waves touched the same byte, one of them writing, with no barrier between them."""


class FaultError(ExecutionError):
    """An access outside every tensor, or outside the workgroup's LDS."""


class DeadlockError(ExecutionError):
    """Waves of a workgroup wait at different barriers, or for a wave that has ended."""
