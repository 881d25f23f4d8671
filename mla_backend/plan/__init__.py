"""Which blocks of keys each query tile meets, and who computes them: generators of `MlaPlan`."""

from mla_backend.plan.planner import MlaPlanner

__all__ = ["MlaPlanner"]
