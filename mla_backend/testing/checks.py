"""Calls of each path that ``kda-dsv4 check`` makes and ``tune`` times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from backend_core.operator import forced
from mla_backend.launch_params import TABLES
from mla_backend.plan import MlaPlanner
from mla_backend.spec import MlaSpec
from mla_backend.testing import cascade_checks
from mla_backend.testing.cases import SCALE, expected, make_case, run_case

if TYPE_CHECKING:
    from backend_core.family import CheckCase
    from backend_core.tables.schema import Row
    from backend_core.target import Target

ALLOWED = 6e-3
"""Relative L2 of the output; rounding it to bf16 alone is 2e-3."""
LSE_ALLOWED = 2e-3
"""Absolute."""
_RAGGED = [0, 1, 63, 64, 65, 200]


def check_cases(row: Row) -> Mapping[str, CheckCase]:
    """Ragged and empty requests, several query tokens, shared prefixes, and levels of keys that are
    merged, which no path is chosen for."""
    specs = {
        "ragged": MlaSpec(4, 64),
        "16 heads, drafts of 2": MlaSpec(16, 64, query_tokens=2),
        "32 heads": MlaSpec(32, 64),
    }
    found = {name: _case(row, spec) for name, spec in specs.items()}
    found["shared prefix"] = _case(row, specs["ragged"], shared_prefix_tokens=64)
    if row.name == "triton":
        found["cascade of two levels"] = cascade_checks.two_levels
    return found


def _case(row: Row, spec: MlaSpec, **plans: Any) -> CheckCase:
    """``plans``: how the planner is made. Requests that share tokens have them."""

    def run(target: Target, device: torch.device) -> tuple[float, float]:
        planner = MlaPlanner(forced(TABLES, target, spec, row), **plans)
        shared = plans.get("shared_prefix_tokens", 0)
        lengths = [shared + n for n in _RAGGED] if shared else _RAGGED
        case = make_case(spec, lengths, shared_tokens=shared, device=device)
        out, lse = run_case(case, planner)
        want_out, want_lse = expected(case)
        none = want_lse == float("inf")
        if not (lse[none] == float("inf")).all() or out[none].any():
            raise RuntimeError("a request without keys must have output 0 and LSE +inf")
        lse_error = float((lse.double() - want_lse)[~none].abs().max())
        if not lse_error <= LSE_ALLOWED:
            raise RuntimeError(f"error of the LSE is {lse_error:.1e}, allowed {LSE_ALLOWED:.1e}")
        return float((out.double() - want_out).norm() / want_out.norm()), ALLOWED

    return run


def decode_call(row: Row, target: Target, requests: int, heads: int) -> Callable[[], object]:
    """A step of ``requests`` requests of 8,192 tokens, planned beforehand."""
    from mla_backend.api import mla_decode

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = MlaSpec(heads, 64)
    selection = forced(TABLES, target, spec, row)
    case = make_case(spec, [8192] * requests, device=device)
    plan = MlaPlanner(selection).plan(case.lengths, case.block_table)
    tensors = (case.q_latent, case.q_rope, case.kv_latent, case.kv_rope, case.block_table)
    return lambda: mla_decode(*tensors, plan, selection, scale=SCALE)
