"""Which blocks of keys each query tile meets, and who computes them: generators of `StepPlan`."""

from softmax_backend.plan.planner import MlaPlanner

__all__ = ["MlaPlanner"]
