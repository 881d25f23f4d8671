"""The kernel paths of a model: chosen once at load, looked up by grid in each call.

`kda_backend.launch_params` defines the unit of each operator's grid.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from backend_core.contracts import interprets
from backend_core.operator import Selection, choose
from backend_core.tables.load import PathTable, load_table
from backend_core.tables.schema import Row
from backend_core.target import Target, detect_target
from kda_backend.launch_params import ORDERS, TABLES
from kda_backend.spec import tile_width

if TYPE_CHECKING:
    from kda_backend.contract.calls import RecordsPath, StepPath


@dataclass(frozen=True)
class KdaShape:
    """The properties of a model that decide which paths can serve it.

    Attributes:
        num_heads: query and key heads on this rank, ``H``.
        num_value_heads: value heads on this rank, ``HV``.
        key_dim, value_dim: ``K`` and ``V``.
        bounded_gate: the model's gate has a lower bound.
        dtype: the dtype of q, k and v; gate_dtype: the dtype of g.
        aligned_state: slots of the state pool, and the convolution's weight, start at multiples of
            16 bytes.
        deterministic_prefix: a token's results have the same bits wherever the tokens before it
            were cut into calls (docs/families/kda.md). If false, prefill may scan segments of long
            sequences.
        batch_invariant: a token's results have the same bits whatever else is in its call, and
            those of a prefix as well (docs/reliability.md). If false, paths and their forms follow
            from the size of the call.
    """

    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    bounded_gate: bool = False
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.bfloat16
    aligned_state: bool = True
    deterministic_prefix: bool = False
    batch_invariant: bool = False

    @property
    def keeps_prefixes(self) -> bool:
        """Whether the bits of a prefix are promised."""
        return self.deterministic_prefix or self.batch_invariant

    def requires(self, operator: str) -> frozenset[str]:
        """The features that a path of this operator must declare to serve this model."""
        needs = {"bounded_gate" if self.bounded_gate else "unbounded_gate"}
        if self.num_value_heads != self.num_heads:
            needs.add("grouped_values")
        if self.key_dim != 128 or self.value_dim != 128:
            needs.add("any_head_dim")
        if self.dtype != torch.bfloat16 or self.gate_dtype != torch.bfloat16:
            needs.add("any_dtype")
        if operator == "prefill" and tile_width(self.key_dim) * self.dtype.itemsize > 256:
            needs.add("wide_rows")  # of K: their tiles take twice the shared memory and more
        if operator == "prefill" and self.keeps_prefixes:
            needs.add("deterministic_prefix")
        if self.batch_invariant:
            needs.add("batch_invariant")
        if operator in ("decode_step", "verify_records") and not self.aligned_state:
            needs.add("unaligned_state")
        return frozenset(needs)


Paths: TypeAlias = "Selection[KdaShape, Callable[..., None]]"
StepPaths: TypeAlias = "Selection[KdaShape, StepPath]"
RecordsPaths: TypeAlias = "Selection[KdaShape, RecordsPath]"
AnyPaths: TypeAlias = "Paths | StepPaths | RecordsPaths"


@dataclass(frozen=True, eq=False)
class KdaSelection:
    """The paths that were chosen for one model on one target, for each operator.

    Selections are compared by identity, since every call looks its selection up.
    """

    target: Target
    shape: KdaShape
    prefill: Paths
    recurrent: Paths
    decode_step: StepPaths
    verify: StepPaths
    verify_records: RecordsPaths

    @property
    def operators(self) -> tuple[AnyPaths, ...]:
        return self.prefill, self.recurrent, self.decode_step, self.verify, self.verify_records

    def single_paths(self) -> Iterator[KdaSelection]:
        """This selection with each of its paths alone, for every grid."""
        for operator in self.operators:
            for path in dict.fromkeys(operator.rows):
                yield self.with_path(path)

    def with_path(self, row: Row) -> KdaSelection:
        """This selection with ``row`` alone for its operator, for every grid. Behind a row that
        serves some calls only, its last row serves the others."""
        chosen: AnyPaths = getattr(self, row.operator)
        rows = (row, chosen.rows[-1]) if row.is_limited else (row,)
        forced: dict[str, Any] = {row.operator: chosen.only(*rows)}
        return replace(self, **forced)

    def explain(self) -> list[str]:
        """One line for each row of the table: grids, path, parameters, provenance or refusal."""
        return [str(row) for operator in self.operators for row in operator.explained]


def deterministic_prefix() -> bool:
    """`KdaShape.deterministic_prefix` of a model in an engine, which is what the user says by
    ``KDA_DSV4_DETERMINISTIC_PREFIX`` (0 or 1), by default 0.

    Raises:
        ValueError: the variable has another value.
    """
    text = os.environ.get("KDA_DSV4_DETERMINISTIC_PREFIX", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"KDA_DSV4_DETERMINISTIC_PREFIX must be 0 or 1, got {text!r}")
    return text == "1"


def rounded_prefix(shape: KdaShape, state_dtype: torch.dtype) -> str | None:
    """Why a server's bits depend on where a prompt was cut although its user asks that they do not;
    ``None`` where nothing does."""
    if not shape.deterministic_prefix or state_dtype == torch.float32:
        return None
    return (
        "KDA_DSV4_DETERMINISTIC_PREFIX=1 needs fp32 states: those in"
        f" {str(state_dtype).removeprefix('torch.')} are rounded wherever a call ends, so bits"
        " depend on where a prompt was cut"
    )


@functools.lru_cache(maxsize=256)
def select(target: Target, shape: KdaShape) -> KdaSelection:
    """Choose the paths of a model from the path table of a target. Call it at model load.

    Args:
        target: the GPU or CPU (``backend_core.target.detect_target``).
        shape: the facts of the model that decide which paths can serve it.

    Returns:
        For each operator the path of every size of call; ``explain()`` gives it in words.

    Raises:
        LookupError: no table for the target, or no row that can serve the shape.
    """
    table = load_table(TABLES, target)
    chosen = _chosen(table, target, shape)
    if shape.batch_invariant:
        chosen = _chosen(_of_one_order(table, chosen), target, shape)
    return KdaSelection(target, shape, **chosen)


def _chosen(table: PathTable, target: Target, shape: KdaShape) -> dict[str, Any]:
    return {name: choose(table, name, target, shape) for name in TABLES.operator_names}


def _of_one_order(table: PathTable, chosen: Mapping[str, Any]) -> PathTable:
    """The table, where rows whose path computes in another order than the last one, which serves
    every call, lack ``batch_invariant``: a table of the user's own may mix them."""
    mixed = {
        row
        for selection in chosen.values()
        for row in selection.rows
        if _order(row) != _order(selection.rows[-1])
    }
    rows = (
        replace(row, features=row.features - {"batch_invariant"}) if row in mixed else row
        for row in table.rows
    )
    return replace(table, rows=tuple(rows))


def _order(row: Row) -> tuple[Any, ...]:
    """Equal for paths with the same order of operations on a token."""
    name = ORDERS.get(row.name)
    return (row.name, row.params) if name is None else (name,)


def warm_up(
    selection: KdaSelection,
    prefill: Callable[[KdaSelection], object],
    decode: Callable[[KdaSelection], object],
) -> None:
    """Compile and load, at model load, every kernel that the selection can choose.

    Args:
        prefill, decode: make one small call of the operator with the selection they are given and
            otherwise just as the model will: dtypes, strides, gate, pool. A kernel is compiled
            anew for each of these that it has not seen. Without gradients: an engine may load
            its model where they are on, and parameters ask for them.
    """
    with torch.no_grad():
        for single in selection.single_paths():
            prefill(single)
            decode(single)


@functools.lru_cache(maxsize=256)
def selection_for(device: torch.device, shape: KdaShape) -> KdaSelection:
    """The selection of calls that bring none; made once for each device and shape."""
    return select(detect_target(device), shape)


def selection_of_call(
    selection: KdaSelection | None, device: torch.device, shape: KdaShape
) -> KdaSelection:
    """The selection that a call brings, which must be for its shape, or the device's own.

    Raises:
        ValueError: the selection is for another shape, or for a GPU and the tensors on a CPU.
        LookupError: as ``select``.
    """
    if selection is None:
        return selection_for(device, shape)
    # whether a pool is aligned shows at its address: the path that needs it looks; what bits may
    # depend on, a call does not say
    chosen = replace(
        shape,
        aligned_state=selection.shape.aligned_state,
        deterministic_prefix=selection.shape.deterministic_prefix,
        batch_invariant=selection.shape.batch_invariant,
    )
    if selection.shape != chosen:
        raise ValueError(f"selection must be for {shape}, got one for {selection.shape}")
    if device.type == "cpu" and selection.target.vendor != "cpu" and not interprets():
        raise ValueError(f"selection must be for a CPU, got one for {selection.target.name}")
    return selection
