"""Calls of sparse MLA's paths that ``kda-dsv4 check`` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from backend_core.operator import forced
from mla_backend import reference_sparse_mla as reference
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.launch_params import TABLES
from mla_backend.sparse_mla import sparse_mla
from mla_backend.spec_sparse_mla import SparseMlaSpec
from mla_backend.testing.sparse_mla_cases import (
    SCALE,
    Result,
    disagreement,
    expected,
    make_case,
    run_case,
)

if TYPE_CHECKING:
    from backend_core.family import CheckCase
    from backend_core.tables.schema import Row
    from backend_core.target import Target

ALLOWED = 6e-3
"""Relative L2 of the output; rounding it to bf16 alone is 2e-3."""

RAGGED = 150


def check_cases(row: Row) -> Mapping[str, CheckCase]:
    """Two caches and one, several query tokens, splits, lists that name nothing, many lists of
    different lengths, and prefill."""
    lists = [(64, 100, [100, 0, 33]), (2, 70, [70, 0, 64])]
    cases: dict[str, CheckCase] = {}
    for heads, tokens, splits in ((8, 1, 1), (8, 2, 3), (20, 1, 2)):
        name = f"{heads} heads, {tokens} query tokens, {splits} splits"
        cases[name] = partial(_decode, row, heads, tokens, splits, lists)
    cases["window alone"] = partial(_decode, row, 16, 1, 2, [(64, 128, None)])
    if row.name == "gluon_sm90":
        for heads, tokens in ((8, 1), (40, 2)):
            name = f"{RAGGED} requests of any lengths, {heads} heads, {tokens} query tokens"
            cases[name] = partial(_ragged, row, heads, tokens)
    if "bf16_rows_cache" in row.features:
        cases["prefill over rows of bf16"] = partial(_prefill, row)
    return cases


def _decode(
    row: Row,
    heads: int,
    tokens: int,
    splits: int,
    lists: Sequence[tuple[int, int, Sequence[int] | None]],
    target: Target,
    device: torch.device,
) -> tuple[float, float]:
    case = make_case(heads, lists, tokens=tokens, has_sinks=True, device=device)
    selection = forced(TABLES, target, case.spec, row)
    return _judged(run_case(case, selection, splits), expected(case))


def _ragged(
    row: Row, heads: int, tokens: int, target: Target, device: torch.device
) -> tuple[float, float]:
    """Lists of so many blocks that CTAs share all tokens' rows equally."""
    generator = torch.Generator().manual_seed(0)
    own, extra = (torch.randint(0, n, (RAGGED,), generator=generator) for n in (129, 449))
    extra[::3] //= 50
    lists = [(64, 128, own.tolist()), (2, 448, extra.tolist())]
    case = make_case(heads, lists, requests=RAGGED, tokens=tokens, has_sinks=True, device=device)
    selection = forced(TABLES, target, case.spec, row)
    return _judged(run_case(case, selection), expected(case))


def _prefill(row: Row, target: Target, device: torch.device) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    kv = (0.1 * torch.randn(90, 512, generator=generator)).bfloat16().to(device)
    q = (8 * torch.randn(4, 1, 8, 512, generator=generator)).bfloat16().to(device)
    indices = torch.randint(-5, 100, (4, 1, 70), generator=generator, dtype=torch.int32).to(device)
    lengths = torch.tensor([70, 33, 0, 5], dtype=torch.int32).to(device)
    spec = SparseMlaSpec(8, "bf16_rows")
    selection = forced(TABLES, target, spec, row)
    got = sparse_mla(q, NamedRows(kv, indices, lengths), selection, scale=SCALE)
    want = reference.sparse_mla(q, [(kv, indices, lengths)], SCALE)
    return _judged(got, want)


def _judged(got: Result, want: Result) -> tuple[float, float]:
    if found := disagreement(got, want):
        raise RuntimeError(f"beyond FlashMLA's tolerances: {found}")
    return float((got[0].double() - want[0]).norm() / want[0].norm()), ALLOWED
