"""The kernel paths that serve an operator on a GPU, chosen at model load from the path table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backend_core.operator import Selection, select
from backend_core.tables.schema import UPSTREAM, Row
from backend_core.target import Target
from dsv4_backend.launch_params import TABLES
from dsv4_backend.spec import CompressorSpec, StepSpec
from dsv4_backend.step_plan import StateLayout


def select_step(
    target: Target, spec: StepSpec, phase: str, upstream: str | None = None
) -> Selection[StepSpec, Any]:
    """The paths of ``compress_decode_`` or ``compress_prefill_``, by the phase's name.

    Raises:
        LookupError: there is no table for the target, or no path for such a step.
    """
    return select(TABLES, f"{spec.compressor.kind}_{phase}", target, spec, upstream)


def decode_selection(
    target: Target, spec: CompressorSpec, upstream: str | None = None
) -> Selection[StepSpec, Any]:
    """The paths of ``compress_decode_`` for a kind of compressor."""
    return select_step(target, StepSpec(spec, "ring", spec.compress_ratio), "decode", upstream)


def prefill_selection(
    target: Target, spec: CompressorSpec, state_layout: StateLayout, upstream: str | None = None
) -> Selection[StepSpec, Any]:
    """The paths of ``compress_prefill_`` for a kind of compressor and a layout of its state."""
    step = StepSpec(spec, state_layout, spec.compress_ratio)
    return select_step(target, step, "prefill", upstream)


def in_words(
    spec: CompressorSpec, selections: Iterable[Selection[StepSpec, Any]]
) -> tuple[str, list[str]]:
    """A kind of compressor, and the paths of each of its operators."""
    paths = []
    for selection in selections:
        names = ", ".join(dict.fromkeys(map(_name, selection.rows)))
        paths.append(f"{selection.operator.name.rpartition('_')[2]} {names}")
    kind = f"{spec.head_dim} channels and ratio {spec.compress_ratio} ({spec.cache_format})"
    return f"DeepSeek-V4's compressors of {kind}", paths


def _name(row: Row) -> str:
    return f"upstream's {row.params.kernel}" if row.name == UPSTREAM else row.name


def expect_operator(selection: Selection[Any, Any], operator: str) -> Selection[Any, Any]:
    """A selection that a caller made, which must be one of the operator.

    Raises:
        ValueError: it is another operator's.
    """
    if selection.operator.name != operator:
        raise ValueError(f"selection must be of {operator}, got one of {selection.operator.name}")
    return selection
