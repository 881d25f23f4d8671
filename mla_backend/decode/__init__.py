"""MLA decode's paths: a module for each, whose `bind` returns a `MlaRun` of checked calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.scratch import SplitScratch

MlaRun: TypeAlias = Callable[[MlaInputs, SplitScratch], None]
