"""A decode step in one launch: state rows, pooling, norm, RoPE, rotation, quantisation, store."""

from __future__ import annotations

import functools

import torch

from backend_core.tables.select import KernelPath, PathSelection
from backend_core.target import Target, detect_target
from dsv4_backend.compressor.bound import BoundLaunch, ByGrid, CompressorCall, Pipeline
from dsv4_backend.compressor.torch_step import TorchStep
from dsv4_backend.compressor.variants import decode_variant, splits_of
from dsv4_backend.contract.calls import check_step
from dsv4_backend.selection import decode_selection, expect_operator
from dsv4_backend.step_plan import DecodeStepPlan


class OneLaunch:
    """One program per request does all of the step."""

    def __init__(self, path: KernelPath, call: CompressorCall, step_plan: DecodeStepPlan) -> None:
        spec, block = call.layer.spec, call.state.shape[1]
        safe = step_plan.pdl_prefetch_safe
        variant = decode_variant(path, spec, step_plan.state_layout, block, safe)
        self._step = BoundLaunch(variant, call, step_plan)

    def __call__(self, call: CompressorCall, step_plan: DecodeStepPlan) -> None:
        self._step((step_plan.num_tokens, 1, 1), call, step_plan)

    def warm_up(self, call: CompressorCall, step_plan: DecodeStepPlan) -> None:
        self._step.warm_up(call, step_plan)


class SplitChannels:
    """Several programs per request, which the last of them to arrive finishes.

    Its memory belongs to one layer. It is made for the largest grid of the path; where that is open
    it grows, and what was grown out of is kept, since a CUDA graph may hold it.
    """

    has_memory = True  # see LaunchCache

    def __init__(self, path: KernelPath, call: CompressorCall, step_plan: DecodeStepPlan) -> None:
        if torch.version.hip is not None and path.params.num_warps > 1:
            raise ValueError(
                f"splits of {path.operator} must come with num_warps 1 on HIP, got"
                f" {path.params.num_warps}"
            )
        spec = call.layer.spec
        safe, block = step_plan.pdl_prefetch_safe, call.state.shape[1]
        self._variant = decode_variant(path, spec, step_plan.state_layout, block, safe)
        self._splits = splits_of(path)
        self._kept: list[BoundLaunch] = []
        self._capacity = 0
        self._grow(max(path.max_grid or 1, step_plan.num_tokens), call, step_plan)

    def _grow(self, capacity: int, call: CompressorCall, step_plan: DecodeStepPlan) -> None:
        new = functools.partial(torch.zeros, device=call.state.device)
        memory = {
            "columns_ptr": new(capacity, call.layer.spec.head_dim, dtype=torch.float32),
            "arrived_ptr": new(capacity, dtype=torch.int32),
        }
        self._kept.append(BoundLaunch(self._variant, call, step_plan, memory))
        self._capacity = capacity

    def __call__(self, call: CompressorCall, step_plan: DecodeStepPlan) -> None:
        if step_plan.num_tokens > self._capacity:
            self._grow(2 * step_plan.num_tokens, call, step_plan)
        self._kept[-1]((step_plan.num_tokens * self._splits, 1, 1), call, step_plan)

    def warm_up(self, call: CompressorCall, step_plan: DecodeStepPlan) -> None:
        self._kept[-1].warm_up(call, step_plan)


def bind(
    call: CompressorCall,
    step_plan: DecodeStepPlan,
    target: Target | None,
    selection: PathSelection | None,
) -> ByGrid[Pipeline[DecodeStepPlan]]:
    """Check a call of ``compress_decode_``, select its paths and bind them to its layer.

    Raises:
        ValueError: the call breaks the operator's contract.
        LookupError: there are no kernel paths for the target.
    """
    check_step(call.layer, call.kv_score, call.state, call.caches, step_plan)
    if selection is None:
        selection = decode_selection(target or detect_target(step_plan.device), call.layer.spec)
    expect_operator(selection, f"{call.layer.spec.kind}_decode")

    def build(path: KernelPath) -> Pipeline[DecodeStepPlan]:
        if path.name == "torch":
            return TorchStep()
        pipeline = SplitChannels if splits_of(path) > 1 else OneLaunch
        return pipeline(path, call, step_plan)

    return ByGrid(selection, build)
