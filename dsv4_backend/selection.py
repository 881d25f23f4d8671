"""Which kernel paths serve an operator on a GPU, chosen at model load from the path table."""

from __future__ import annotations

import functools

from backend_core.tables.select import PathSelection, load_table, select
from backend_core.target import Target
from dsv4_backend.launch_params import TABLES
from dsv4_backend.spec import CompressorSpec
from dsv4_backend.step_plan import StateLayout


@functools.cache
def select_paths(target: Target, operator: str, *features: str) -> PathSelection:
    """The paths of ``operator`` that have all ``features``, read from the table once per process.

    Raises:
        LookupError: there is no table for the target, or no path with these features.
    """
    return select(load_table(TABLES, target), operator, frozenset(features))


def decode_selection(target: Target, spec: CompressorSpec) -> PathSelection:
    """The paths of ``compress_decode_`` for a kind of compressor."""
    return select_paths(target, f"{spec.kind}_decode")


def prefill_selection(
    target: Target, spec: CompressorSpec, state_layout: StateLayout
) -> PathSelection:
    """The paths of ``compress_prefill_`` for a kind of compressor and a layout of its state."""
    return select_paths(target, f"{spec.kind}_prefill", state_layout)


def expect_operator(selection: PathSelection, operator: str) -> PathSelection:
    """A selection that a caller made, which must be one of the operator.

    Raises:
        ValueError: it is another operator's.
    """
    if selection.operator != operator:
        raise ValueError(f"selection must be of {operator}, got one of {selection.operator}")
    return selection
