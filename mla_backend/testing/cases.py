"""Inputs of the decode operators: paged caches whose unowned rows are poisoned, ragged lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from backend_core import operator
from backend_core.operator import Selection
from backend_core.tables.load import load_table, shipped_directory
from backend_core.tables.schema import Row
from backend_core.target import KNOWN_TARGETS
from mla_backend import reference
from mla_backend.api import mla_decode
from mla_backend.launch_params import TABLES
from mla_backend.plan import MlaPlanner
from mla_backend.scratch import SplitScratch
from mla_backend.spec import MlaSpec
from mla_backend.spec_sparse_mla import SparseMlaSpec
from mla_backend.step_plan import MlaPlan

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
PATHS = ("torch", "triton", "sm90") if ON_HOPPER else ("torch", "triton")
UNUSED_ENTRY = 2147480000
SCALE = (128 + 64) ** -0.5


@dataclass
class MlaCase:
    """One step."""

    spec: MlaSpec
    q_latent: torch.Tensor
    q_rope: torch.Tensor
    kv_latent: torch.Tensor
    kv_rope: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    result: tuple[torch.Tensor, ...] = ()


def make_case(
    spec: MlaSpec,
    lengths: list[int],
    *,
    seed: int = 0,
    shared_tokens: int = 0,
    device: torch.device | None = None,
) -> MlaCase:
    """Every cache row that no request owns is NaN, every unused table entry 2147480000.

    Args:
        shared_tokens: whole pages of so many leading tokens are the same for all requests.
    """
    device = device or torch.device("cpu")
    generator = torch.Generator().manual_seed(seed)
    size, rows = spec.page_size, (len(lengths), spec.query_tokens, spec.num_heads)
    need = [-(-n // size) for n in lengths]
    shared_pages = shared_tokens // size
    total = sum(need) + 3
    order = torch.randperm(total, generator=generator).tolist()
    table = torch.full((len(lengths), max(*need, 1) + 2), UNUSED_ENTRY, dtype=torch.int32)
    owned = torch.zeros(total, size, dtype=torch.bool)
    for i, count in enumerate(need):
        pages = [order.pop() for _ in range(count)]
        pages[:shared_pages] = (
            table[0, :shared_pages].tolist()[:count] if i else pages[:shared_pages]
        )
        table[i, :count] = torch.tensor(pages, dtype=torch.int32)
        for j, page in enumerate(pages):
            owned[page, : lengths[i] - j * size] = True
    q = torch.randn(*rows, 576, generator=generator).to(spec.dtype)
    cache = torch.randn(total, size, 576, generator=generator).to(spec.dtype)
    cache[~owned] = float("nan")
    case = MlaCase(
        spec=spec,
        q_latent=q[..., :512],
        q_rope=q[..., 512:],
        kv_latent=cache[..., :512],
        kv_rope=cache[..., 512:],
        block_table=table,
        lengths=torch.tensor(lengths, dtype=torch.int32),
    )
    for name, value in vars(case).items():
        if isinstance(value, torch.Tensor):
            setattr(case, name, value.to(device))
    return case


def forced(
    spec: MlaSpec | SparseMlaSpec, name: str, num_sms: int = 5, **params: object
) -> Selection[Any, Any]:
    """A selection with one path alone, its parameters changed where given; of dense MLA on a GPU of
    few SMs, so that small inputs have splits."""
    kind, target = "sparse_mla", KNOWN_TARGETS["cpu" if name == "torch" else "H200"]
    if isinstance(spec, MlaSpec):
        kind, target = "mla_decode", replace(target, num_sms=num_sms)
    rows = load_table(TABLES, target, directory=shipped_directory()).rows
    row: Row = next(row for row in rows if (row.operator, row.name) == (kind, name))
    return operator.forced(TABLES, target, spec, replace(row, params=replace(row.params, **params)))


def run_case(
    case: MlaCase,
    planner: MlaPlanner,
    *,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    plan: MlaPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on poisoned outputs and scratch."""
    plan = plan or planner.plan(case.lengths, case.block_table)
    shape = (*case.q_latent.shape[:3], 512)
    out = torch.full(shape, float("nan"), dtype=case.spec.dtype, device=case.lengths.device)
    lse = torch.full(case.q_latent.shape[:3], float("nan"), device=out.device)
    scratch = SplitScratch(out.device)
    case.result = (out, lse)
    for tensor in scratch.reserve(plan.num_slots, max(case.spec.query_rows, 64), 512):
        tensor.fill_(float("nan"))
    return mla_decode(
        case.q_latent,
        case.q_rope,
        case.kv_latent,
        case.kv_rope,
        case.block_table,
        plan,
        planner.selection,
        scale=SCALE,
        causal=causal,
        sinks=sinks,
        out=out,
        lse=lse,
        scratch=scratch,
    )


def expected(
    case: MlaCase, *, causal: bool = True, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 reference."""
    return reference.mla_decode(
        case.q_latent,
        case.q_rope,
        case.kv_latent,
        case.kv_rope,
        case.block_table,
        case.lengths,
        SCALE,
        causal=causal,
        sinks=sinks,
    )


def assert_close(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    tolerance: float = 6e-3,
) -> None:
    """Relative L2 of the output (bf16's rounding is 2e-3); FlashMLA's own tolerance of the LSE."""
    out, lse = got[0].double(), got[1].double()
    assert not out.isnan().any(), "NaN in the output"
    assert not lse.isnan().any(), "NaN in the LSE"
    none = want[1] == float("inf")
    assert (lse[none] == float("inf")).all() and (out[none] == 0).all()
    if (~none).any():
        error = (out - want[0]).norm() / want[0].norm()
        assert error < tolerance, f"relative error of the output {error:.2e}"
        torch.testing.assert_close(lse[~none], want[1][~none], atol=2e-3, rtol=1e-3)
