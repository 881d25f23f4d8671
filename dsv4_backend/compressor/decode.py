"""A decode step in one launch: state rows, pooling, norm, RoPE, rotation, quantisation, store."""

from __future__ import annotations

from backend_core.tables.select import KernelPath, PathSelection
from backend_core.target import Target, detect_target
from dsv4_backend.compressor.bound import BoundLaunch, ByGrid, CompressorCall, Pipeline
from dsv4_backend.compressor.torch_step import TorchStep
from dsv4_backend.compressor.variants import decode_variant
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
        return TorchStep() if path.name == "torch" else OneLaunch(path, call, step_plan)

    return ByGrid(selection, build)
