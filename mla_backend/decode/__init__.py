"""MLA decode's paths: a module for each, whose `bind` returns a `MlaPath`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.scratch import SplitScratch

Prepared: TypeAlias = Callable[[MlaInputs, SplitScratch], None]
"""Runs checked calls of one plan whose tensors are laid out alike."""


class MlaPath(Protocol):
    """One path, bound to a kind of layer."""

    def prepare(self, x: MlaInputs) -> Prepared:
        """What calls of ``x.plan`` that are laid out as this one have in common.

        It keeps no tensor, and belongs to the plan.
        """
