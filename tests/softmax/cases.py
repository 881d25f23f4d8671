"""Inputs of the decode operators: paged caches whose unowned rows are poisoned, ragged lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PathSelection, load_table
from backend_core.target import KNOWN_TARGETS
from softmax_backend import reference
from softmax_backend.api import mla_decode
from softmax_backend.launch_params import TABLES
from softmax_backend.plan import MlaPlanner
from softmax_backend.scratch import Scratch
from softmax_backend.selection import MlaSelection
from softmax_backend.spec import MlaSpec
from softmax_backend.step_plan import StepPlan

CONFIGS = Path(__file__).parents[2] / "configs"
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
PATHS = ("torch", "triton", "sm90") if ON_HOPPER else ("torch", "triton")
UNUSED_ENTRY = 2147480000
SCALE = (128 + 64) ** -0.5


@dataclass
class MlaCase:
    """One step. ``plain_latent`` and ``plain_rope`` are the cache's numbers for the reference."""

    spec: MlaSpec
    q_latent: torch.Tensor
    q_rope: torch.Tensor
    kv_latent: torch.Tensor
    kv_rope: torch.Tensor
    plain_latent: torch.Tensor
    plain_rope: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    kv_scale: float = 1.0
    kv_scales: torch.Tensor | None = None
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
    cache = torch.randn(total, size, 576, generator=generator)
    case = MlaCase(
        spec, q[..., :512], q[..., 512:], cache, cache, cache, cache, table,
        torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip
    _store(case, cache, owned)
    moved = {
        name: value.to(device) for name, value in vars(case).items()
        if isinstance(value, torch.Tensor)
    }  # fmt: skip
    return replace(case, **moved)


def _store(case: MlaCase, cache: torch.Tensor, owned: torch.Tensor) -> None:
    spec = case.spec
    if spec.cache_format == "16-bit":
        stored = cache.to(spec.dtype)
        stored[~owned] = float("nan")
        case.kv_latent, case.kv_rope = stored[..., :512], stored[..., 512:]
        case.plain_latent, case.plain_rope = stored[..., :512], stored[..., 512:]
        return
    if spec.cache_format == "fp8":
        case.kv_scale = 0.25
        stored = (cache / case.kv_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain = stored.float() * case.kv_scale
        raw = stored.view(torch.uint8)
        raw[~owned] = 0x7F  # NaN
        case.kv_latent, case.kv_rope = stored[..., :512], stored[..., 512:]
        case.plain_latent, case.plain_rope = plain[..., :512], plain[..., 512:]
        return
    groups = cache[..., :512].unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1) / 448
    values = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    raw = torch.empty(*cache.shape[:2], 656, dtype=torch.uint8)
    raw[..., :512] = values.flatten(-2).view(torch.uint8)
    raw[..., 512:528] = scales.contiguous().view(torch.uint8)
    rope = cache[..., 512:].bfloat16()
    raw[..., 528:] = rope.contiguous().view(torch.uint8)
    raw[~owned] = 0xFF  # NaN in every format
    case.kv_latent = raw[..., :512]
    case.kv_scales = raw[..., 512:528].view(torch.float32)
    case.kv_rope = raw[..., 528:].view(torch.bfloat16)
    case.plain_latent = (values.float() * scales[..., None]).flatten(-2)
    case.plain_rope = rope


def forced(spec: MlaSpec, name: str, num_sms: int = 5, **params: int) -> MlaSelection:
    """A selection with one path alone, on a GPU of few SMs, so that small inputs have splits."""
    target = replace(KNOWN_TARGETS["cpu" if name == "torch" else "H200"], num_sms=num_sms)
    rows = [row for row in load_table(TABLES, target, directory=CONFIGS).rows if row.name == name]
    row: KernelPath = replace(rows[0], params=replace(rows[0].params, **params))
    return MlaSelection(target, spec, PathSelection.of(row))


def run_case(
    case: MlaCase,
    planner: MlaPlanner,
    *,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    plan: StepPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on poisoned outputs and scratch."""
    plan = plan or planner.plan(case.lengths, case.block_table)
    shape = (*case.q_latent.shape[:3], 512)
    out = torch.full(shape, float("nan"), dtype=case.spec.dtype, device=case.lengths.device)
    lse = torch.full(case.q_latent.shape[:3], float("nan"), device=out.device)
    scratch = Scratch(out.device)
    case.result = (out, lse)
    for tensor in scratch.reserve(plan.num_slots, max(case.spec.query_rows, 64), 512):
        tensor.fill_(float("nan"))
    return mla_decode(
        case.q_latent, case.q_rope, case.kv_latent, case.kv_rope, case.block_table, plan,
        planner.selection, scale=SCALE, causal=causal, kv_scale=case.kv_scale,
        kv_scales=case.kv_scales, sinks=sinks, out=out, lse=lse, scratch=scratch,
    )  # fmt: skip


def expected(
    case: MlaCase, *, causal: bool = True, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 reference."""
    variant = case.spec.variant
    logits, mask = variant.logits, variant.mask
    return reference.mla_decode(
        case.q_latent, case.q_rope, case.plain_latent, case.plain_rope, case.block_table,
        case.lengths, SCALE, causal=causal, sinks=sinks,
        logits=logits and (lambda s: logits(s, variant.a, variant.b)),
        mask=mask and (lambda key, query: mask(key, query, variant.a, variant.b)),
    )  # fmt: skip


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
