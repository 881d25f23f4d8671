"""The modes of block-sparse attention and their errors against float64, for the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import sparse_attention as peers
from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import from_kinds, uniform_sequences
from block_sparse_backend.sage import quantised_attention
from block_sparse_backend.spec import SageMode
from block_sparse_backend.testing.cases import elements_seen

D = 128
SCALE = D**-0.5
Tensors = tuple[Tensor, Tensor, Tensor]

MODES = {
    "int8": SageMode(),
    "int8, 16-bit values": SageMode(fp8_values=False),
}
EXACT = 3e-3
BOUNDS = {
    "triton": EXACT,
    "gluon": EXACT,
}
"""Largest relative error allowed for normal inputs; 8-bit modes 6e-2."""


def inputs(heads: int, kv_heads: int, m: int, n: int | None = None, seed: int = 0) -> Tensors:
    """[1, H, L, D] views of [1, L, H, D] storage, bf16 normal."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(count: int, length: int) -> Tensor:
        x = torch.randn(1, length, count, D, generator=generator, device="cuda")
        return x.to(torch.bfloat16).transpose(1, 2)

    n = n or m
    return make(heads, m), make(kv_heads, n), make(kv_heads, n)


def families(seed: int = 0) -> Iterator[tuple[str, Tensors]]:
    """Normal inputs, inputs with an offset in every channel, and with four channels eight times."""
    q, k, v = inputs(4, 2, 2000, 3000, seed=seed)
    yield "normal", (q, k, v)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    spread = ((q, 2.0), (k, 3.0), (v, 1.0))
    offsets = [
        s * torch.randn(x.shape[1], 1, D, generator=generator, device="cuda") for x, s in spread
    ]
    q2, k2, v2 = (x + o.to(x.dtype) for x, o in zip((q, k, v), offsets, strict=True))
    yield "channel offsets", (q2, k2, v2)
    wide = torch.ones(D, device="cuda", dtype=torch.bfloat16)
    wide[::32] = 8.0
    yield "four wide channels", (q * wide, k * wide, v)


def ours() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Every causal mode of ours."""

    def exact(path: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            plan = intervals.causal(q.shape[2], k.shape[2], q.shape[1])
            return block_sparse_attention(q, k, v, plan, path=path)[0]

        return call

    def quantised(mode: SageMode) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            plan = intervals.causal(q.shape[2], k.shape[2], q.shape[1], block_m=64)
            return quantised_attention(q, k, v, plan, mode=mode)[0]

        return call

    found = {name: exact(name) for name in ("triton", "gluon")}
    return found | {name: quantised(mode) for name, mode in MODES.items()}


def check(fa3: peers.Attend | None) -> tuple[list[dict[str, Any]], set[str]]:
    """Relative errors of every mode and peer against float64, and the modes that are wrong."""
    rows, wrong = [], set()
    for family, (q, k, v) in families():
        offset = k.shape[2] - q.shape[2]
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").tril(offset)
        want, _ = reference.attention(q, k, v, seen, SCALE)
        calls = ours()
        if fa3 is not None:
            calls["FA3"] = lambda q, k, v: fa3(q, k, v, True)
        for name, call in calls.items():
            try:
                got = call(q, k, v)
                error = float((got.double() - want).norm() / want.norm())
            except Exception as reason:  # one mode's failure must not hide the others' results
                print(f"{name} failed: {str(reason)[:500]}", flush=True)
                error = float("nan")
            rows.append({"family": family, "mode": name, "error": error})
            print(f"{family:20s} {name:26s} {error:.2e}", flush=True)
            if family == "normal" and not error < BOUNDS.get(name, 6e-2):
                wrong.add(name)
    return rows, wrong


def check_plans() -> float:
    """Random rows that differ by head, with an empty one, through the Hopper kernel."""
    q, k, v = inputs(4, 4, 1100, 1300, seed=3)
    kinds = random_kinds(4, 9, 11, 0.4, seed=3)
    kinds[0, 2] = 0
    kinds[..., -1] *= 2
    plan = from_kinds(kinds[None], 4, uniform_sequences(1, 1100, 1300, q.device), 128, 128)
    seen = elements_seen(plan).cuda()
    want, want_lse = reference.attention(q, k, v, seen, SCALE)
    out = torch.full_like(q, torch.nan)
    out, lse = block_sparse_attention(q, k, v, plan, out=out)
    dead = want_lse.isneginf()
    if not torch.equal(lse.isneginf(), dead):
        return float("nan")
    lse_error = float((lse - want_lse)[~dead].abs().max())
    return max(float((out.double() - want).norm() / want.norm()), lse_error)


def random_kinds(heads: int, tiles: int, blocks: int, density: float, seed: int = 0) -> Tensor:
    """int8 [H, tiles, blocks]: as many blocks in every row, FULL."""
    generator = torch.Generator("cuda").manual_seed(seed)
    score = torch.rand(heads, tiles, blocks, generator=generator, device="cuda")
    count = max(1, round(density * blocks))
    kept = score.topk(count, -1).indices
    return torch.zeros_like(score, dtype=torch.int8).scatter_(-1, kept, 1)
