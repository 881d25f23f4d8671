"""A prefill step: every window that ends in the chunks, then the state rows.

On a ring the state rows come after all windows, since they take the place of rows that windows of
the same call still read. A paged state gives every token a row of its own, so there one launch can
do both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from backend_core.tables.select import KernelPath, PathSelection
from backend_core.target import Target, detect_target
from dsv4_backend.compressor.bound import BoundLaunch, ByGrid, CompressorCall, Pipeline
from dsv4_backend.compressor.torch_step import TorchStep
from dsv4_backend.compressor.variants import prefill_variants
from dsv4_backend.contract.calls import check_step
from dsv4_backend.selection import expect_operator, prefill_selection
from dsv4_backend.step_plan import PrefillStepPlan


def _bound(path: KernelPath, call: CompressorCall, step_plan: PrefillStepPlan) -> list[BoundLaunch]:
    spec, block = call.layer.spec, call.state.shape[1]
    variants = prefill_variants(path, spec, step_plan.state_layout, block)
    return [BoundLaunch(variant, call, step_plan) for variant in variants]


class OneLaunch:
    """Programs that write state rows beside programs that pool windows."""

    def __init__(self, path: KernelPath, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        (self._step,) = _bound(path, call, step_plan)
        self._ratio = call.layer.spec.compress_ratio
        self._programs = self._ratio // path.params.rows + 1  # per window or ``ratio`` tokens

    def __call__(self, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        groups = max(step_plan.num_windows, -(-step_plan.num_writes // self._ratio))
        self._step((groups * self._programs, 1, 1), call, step_plan)

    def warm_up(self, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        self._step.warm_up(call, step_plan)


class TwoLaunch:
    """A program per window, then a program per state row."""

    def __init__(self, path: KernelPath, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        self._windows, self._writes = _bound(path, call, step_plan)

    def __call__(self, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        packed = self._windows.pack_input(call)
        self._windows((step_plan.num_windows, 1, 1), call, step_plan, packed)
        self._writes((step_plan.num_writes, 1, 1), call, step_plan, packed)

    def warm_up(self, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        self._windows.warm_up(call, step_plan)
        self._writes.warm_up(call, step_plan)


class ColumnSplit:
    """A program per window and ``block_d`` channels pools them; then a program per window finishes
    it, and a program per state row writes that."""

    def __init__(self, path: KernelPath, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        self._pool, self._finish = _bound(path, call, step_plan)
        self._head_dim = call.layer.spec.head_dim
        self._splits = self._head_dim // path.params.block_d

    def __call__(self, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        windows = step_plan.num_windows
        call.pooled = self._pooled(call, step_plan)
        packed = self._pool.pack_input(call)
        self._pool((windows, self._splits, 1), call, step_plan, packed)
        self._finish((windows + step_plan.num_writes, 1, 1), call, step_plan, packed)

    def warm_up(self, call: CompressorCall, step_plan: PrefillStepPlan) -> None:
        call.pooled = self._pooled(call, step_plan)
        self._pool.warm_up(call, step_plan)
        self._finish.warm_up(call, step_plan)

    def _pooled(self, call: CompressorCall, step_plan: PrefillStepPlan) -> torch.Tensor:
        return call.kv_score.new_empty(step_plan.num_windows, self._head_dim, dtype=torch.float32)


_PIPELINES: Mapping[
    str,
    Callable[[KernelPath, CompressorCall, PrefillStepPlan], Pipeline[PrefillStepPlan]],
] = {
    "one_launch": OneLaunch,
    "two_launch": TwoLaunch,
    "column_split": ColumnSplit,
    "torch": lambda path, call, step_plan: TorchStep(),
}


def bind(
    call: CompressorCall,
    step_plan: PrefillStepPlan,
    target: Target | None,
    selection: PathSelection | None,
) -> ByGrid[Pipeline[PrefillStepPlan]]:
    """Check a call of ``compress_prefill_``, select its paths and bind them to its layer.

    Raises:
        ValueError: the call breaks the operator's contract.
        LookupError: there are no kernel paths for the target.
    """
    check_step(call.layer, call.kv_score, call.state, call.caches, step_plan)
    spec, layout = call.layer.spec, step_plan.state_layout
    if selection is None:
        selection = prefill_selection(target or detect_target(step_plan.device), spec, layout)
    expect_operator(selection, f"{spec.kind}_prefill")
    return ByGrid(selection, lambda path: _PIPELINES[path.name](path, call, step_plan))
