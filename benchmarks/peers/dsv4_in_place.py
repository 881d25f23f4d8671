"""Peers of the in-place operator: the operation in two launches, and through memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from backend_core.kernels.rope_hadamard import hadamard, load_angles, rope_tail
from dsv4_backend import SeqLens, compress_norm_rope_hadamard_
from dsv4_backend.kernels.finish import rms_norm
from dsv4_backend.kernels.norm_rope_rotate import norm_rope_rotate_kernel

EPS = 1e-6


@triton.jit
def hadamard_kernel(x_ptr, stride_x_r, D: tl.constexpr):
    row_ptr = x_ptr + tl.program_id(0).to(tl.int64) * stride_x_r + tl.arange(0, D)
    tl.store(row_ptr, hadamard(tl.load(row_ptr), D))


@triton.jit
def through_memory_kernel(
    x_ptr, weight_ptr, table_ptr, seq_len_ptr, eps, stride_x_r, stride_table_p, D: tl.constexpr
):
    """Norm and RoPE, then each butterfly stage as a store and two loads between barriers."""
    i_n = tl.program_id(0)
    o_d = tl.arange(0, D)
    row_ptr = x_ptr + i_n.to(tl.int64) * stride_x_r
    b_x = rms_norm(tl.load(row_ptr + o_d), tl.load(weight_ptr + o_d), eps, D)
    b_angles = load_angles(table_ptr, tl.load(seq_len_ptr + i_n) - 4, stride_table_p, D, False)
    b_x = rope_tail(b_x, b_angles, D)
    tl.store(row_ptr + o_d, b_x)
    for i_s in tl.static_range(7):
        tl.debug_barrier()
        b_self = tl.load(row_ptr + o_d)
        b_partner = tl.load(row_ptr + (o_d ^ (1 << i_s)))
        b_x = tl.where((o_d >> i_s) & 1 == 0, b_self + b_partner, b_partner - b_self)
        if i_s == 6:
            b_x = b_x * (1.0 / D**0.5)
        tl.debug_barrier()
        tl.store(row_ptr + o_d, b_x)


@triton.jit
def empty_kernel(x_ptr):
    pass


def rows_calls(n: int, rope_table: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The in-place operator on n pooled indexer rows: ours, in two launches, through memory."""
    x = torch.randn(n, 128, device="cuda")
    weight = torch.ones(128, device="cuda")
    table = torch.stack(rope_table.chunk(2, 1), -1).flatten(1).contiguous()
    seq_lens = (torch.randint(1, 4096, (n,), device="cuda") * 4).int()
    plan = SeqLens(seq_lens)

    def two_launch() -> None:
        norm_rope_rotate_kernel[(n,)](
            x, weight, table, seq_lens, EPS, 128, 64,
            D=128, RATIO=4, HAS_ROTATION=False, PDL="off", num_warps=1,
        )  # fmt: skip
        hadamard_kernel[(n,)](x, 128, D=128, num_warps=1)

    def through_memory() -> None:
        through_memory_kernel[(n,)](
            x, weight, table, seq_lens, EPS, 128, 64, D=128, num_warps=4
        )  # fmt: skip

    def one_launch() -> None:
        compress_norm_rope_hadamard_(
            x, weight, EPS, table, plan, head_dim=128, compress_ratio=4, rotate=True
        )

    return {"ours": one_launch, "two_launch": two_launch, "seed_style": through_memory}
