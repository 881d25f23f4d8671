"""The contract of block-sparse attention, stated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backend_core.contracts import (
    expect_apart,
    expect_device,
    expect_dtype,
    expect_shape,
    expect_stride,
    expect_tensor,
    expect_tensors,
    number,
    whole_number,
)
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.spec import LOG2_E

HEAD_DIMS = {(64, 64), (128, 128), (192, 128), (256, 256)}
"""(D, DV) of the Triton and Gluon kernels."""


@dataclass(slots=True, eq=False)
class BlockSparseInputs:
    """One call of `block_sparse.block_sparse_attention`, as the paths take it."""

    q: Tensor
    k: Tensor
    v: Tensor
    plan: BlockPlan
    scale: float
    out: Tensor
    lse: Tensor

    @property
    def factor(self) -> float:
        """The factor from the kernels' products to base-2 logits."""
        return self.scale * LOG2_E


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether torch would record a call with these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def refuse_gradients(q: Tensor, k: Tensor, v: Tensor) -> None:
    """
    Raises:
        ValueError: torch would record the call, which nothing here differentiates; or one is no
            tensor.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        expect_tensors(q=q, k=k, v=v)
    if needs_gradient(q, k, v):
        raise ValueError("block_sparse_backend has no backward pass: call it under torch.no_grad()")


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor of the logits, by default 1 / sqrt(D). It has not been checked."""
    if scale is not None:
        return number("scale", scale)
    # no channel, or no dimension, is refused by the checks that follow
    return (q.shape[-1] or 1) ** -0.5 if q.dim() else 1.0


def is_readable(x: Tensor) -> bool:
    """Whether the kernels' descriptors can read a [B, H, L, D] view of 16-bit numbers."""
    strides = x.stride()
    return (
        (strides[3] == 1 or x.shape[3] == 1)
        and not x.data_ptr() % 16
        and not any(s % 8 for s, n in zip(strides[:3], x.shape, strict=False) if n > 1)
    )


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy where x is not readable."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def empty_output(q: Tensor, dv: int) -> Tensor:
    """[B, H, M, DV] in the memory order of ``q``: [B, M, H, DV] where q is stored so."""
    b, h, m, _ = q.shape
    if q.stride(1) < q.stride(2):
        return torch.empty(b, m, h, dv, dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty(b, h, m, dv, dtype=q.dtype, device=q.device)


def check_block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Check the arguments of ``block_sparse_attention``.

    Raises:
        ValueError: one sentence with what was expected and what came.
    """
    check_tensors(q, k, v, out, lse)
    if q.shape[1] != plan.num_heads:
        raise ValueError(f"q must have the plan's {plan.num_heads} heads, got {q.shape[1]}")
    if not plan.is_packed and plan.sequences.shape[0] != q.shape[0]:
        raise ValueError(
            f"plan must have a sequence for each of the {q.shape[0]} entries of q's batch, got"
            f" {plan.sequences.shape[0]}"
        )
    if plan.lengths is not None and plan.lengths != (q.shape[2], k.shape[2]):
        queries, keys = plan.lengths
        raise ValueError(
            f"q and k must have the plan's {queries} queries and {keys} keys, got"
            f" {q.shape[2]} and {k.shape[2]}"
        )
    expect_device("plan", plan.rows, q.device)


def check_heads(**tensors: Tensor) -> None:
    """Shapes of queries ``q`` and keys ``k``, and the number of dimensions of all by name.

    Raises:
        ValueError: one sentence with what was expected and what came.
    """
    for name, x in tensors.items():
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {list(x.shape)}")
    q, k = tensors["q"], tensors["k"]
    batch, heads, _, d = q.shape
    expect_shape("k", k, (batch, "Hkv", "N", d))
    if not d:
        raise ValueError(f"q must have at least one channel, got shape {list(q.shape)}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"heads of k must divide those of q, got {k.shape[1]} and {heads}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    """Shapes, dtypes, devices and strides of what attention reads and writes.

    Raises:
        ValueError: one sentence with what was expected and what came.
    """
    check_heads(q=q, k=k, v=v)
    batch, heads, q_rows, _ = q.shape
    expect_shape("v", v, (batch, k.shape[1], k.shape[2], "DV"))
    for name, x in (("k", k), ("v", v)):
        expect_dtype(name, x, q.dtype)
        expect_device(name, x, q.device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_stride(name, x, 3, 1)
    if out is not None:
        expect_tensor("out", out, (batch, heads, q_rows, v.shape[3]), q.dtype, q.device)
        expect_apart("out", out)
    if lse is not None:
        expect_tensor("lse", lse, (batch, heads, q_rows), torch.float32, q.device)
        expect_apart("lse", lse)


def check_kernel(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> None:
    """Require of a call of the kernels more than the operator's contract does.

    Raises:
        ValueError: one sentence with what was expected and what came.
    """
    expect_dtype("q", q, torch.bfloat16, torch.float16)
    if not k.numel():
        raise ValueError(f"k must have at least one token, got shape {list(k.shape)}")
    dims = (q.shape[3], v.shape[3])
    if dims not in HEAD_DIMS:
        raise ValueError(f"head sizes (D, DV) must be one of {sorted(HEAD_DIMS)}, got {dims}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_readable(x):
            raise ValueError(
                f"{name} must have its address and strides in multiples of 16 bytes, got strides "
                f"{x.stride()}"
            )
    for name, size in (("block_m", plan.block_m), ("block_n", plan.block_n)):
        if size not in (16, 32, 64, 128):
            raise ValueError(f"{name} of the plan must be 16, 32, 64 or 128, got {size}")


def check_quantised(q: Tensor, v: Tensor, block_n: int) -> None:
    """Require of 8-bit attention more than the contract of block-sparse attention does.

    Raises:
        ValueError: one sentence with what was expected and what came.
    """
    expect_dtype("q", q, torch.bfloat16, torch.float16)
    d, dv = q.shape[3], v.shape[3]
    if d not in (64, 128) or dv != d:
        raise ValueError(f"head size must be 64 or 128 in q, k and v, got {d} and {dv}")
    if not v.shape[2]:
        raise ValueError(f"k must have at least one token, got shape {list(v.shape)}")
    if block_n not in (16, 32, 64, 128):
        raise ValueError(f"block_n of the plan must be 16, 32, 64 or 128, got {block_n}")


def check_quantised_plan(q: Tensor, plan: BlockPlan) -> None:
    """A plan for 8-bit attention is of one batch of equal sequences.

    Raises:
        ValueError: it is not.
    """
    if plan.is_packed:
        raise ValueError("the plan of 8-bit attention must be of a batch, got packed sequences")
    if plan.sequences.shape[0] != q.shape[0]:
        raise ValueError(
            f"the plan of 8-bit attention must be of {q.shape[0]} equal sequences, one for each "
            f"batch entry, got {plan.sequences.shape[0]}"
        )


def check_prediction(q: Tensor, k: Tensor, block_m: int, block_n: int) -> None:
    """Queries and keys of a prediction; columns of its plan are numbered in int32.

    Raises:
        ValueError: there would be 2^31 or more, or there is no token, or a shape or a block's size
            is wrong.
    """
    check_heads(q=q, k=k)
    whole_number("block_m", block_m, 1)
    whole_number("block_n", block_n, 1)
    for name, x in (("q", q), ("k", k)):
        if not x.numel():
            raise ValueError(f"{name} must have at least one token, got shape {list(x.shape)}")
    b, h, m, _ = q.shape
    total = b * h * -(-m // block_m) * -(-k.shape[2] // block_n)
    if total >= 1 << 31:
        raise ValueError(
            f"a predicted plan must have fewer than 2^31 blocks of {block_m} queries by {block_n} "
            f"keys over all heads, got {total}"
        )
