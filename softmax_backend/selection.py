"""Which path serves a layer's decode steps: chosen once at model load."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PathSelection, load_table
from backend_core.tables.select import select as select_paths
from backend_core.target import Target, detect_target
from softmax_backend.launch_params import TABLES
from softmax_backend.spec import MlaSpec


@dataclass(frozen=True, eq=False)
class MlaSelection:
    """The paths chosen for one kind of layer on one target."""

    target: Target
    spec: MlaSpec
    mla_decode: PathSelection

    def path(self, requests: int) -> KernelPath:
        """The path for a step of so many requests."""
        return self.mla_decode.lookup(requests * self.spec.query_rows)

    def explain(self) -> list[str]:
        """One line for each row of the table: bucket, path, parameters, provenance or refusal."""
        return [str(row) for row in self.mla_decode.explain()]


@functools.lru_cache(maxsize=256)
def select(target: Target, spec: MlaSpec) -> MlaSelection:
    """Choose the paths of a layer; call it at model load.

    Raises:
        LookupError: no table for the target, or no row that can serve the spec.
    """
    table = load_table(TABLES, target)
    return MlaSelection(target, spec, select_paths(table, "mla_decode", spec.requires()))


def select_for(device: torch.device, spec: MlaSpec) -> MlaSelection:
    """The selection for the processor that a device is."""
    return select(detect_target(device), spec)
