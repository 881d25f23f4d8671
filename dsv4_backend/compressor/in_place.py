"""Norm, RoPE and rotation of pooled rows in place, one launch or torch."""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from backend_core.contracts import expect_kernel_device
from backend_core.tables.select import KernelPath, PathSelection
from backend_core.target import Target
from dsv4_backend import reference
from dsv4_backend.compressor.bound import ByGrid
from dsv4_backend.compressor.variants import in_place_variant
from dsv4_backend.selection import expect_operator, select_paths


class InPlace(Protocol):
    """One kernel path of the operator."""

    def __call__(
        self,
        kv: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rope_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None: ...


@functools.cache
def pipelines(target: Target, head_dim: int, compress_ratio: int, rotate: bool) -> ByGrid[InPlace]:
    """The operator's paths on a target, by plan entries."""
    selection = select_paths(target, f"in_place_{head_dim}")
    return pipelines_of(selection, head_dim, compress_ratio, rotate)


def pipelines_of(
    selection: PathSelection, head_dim: int, compress_ratio: int, rotate: bool
) -> ByGrid[InPlace]:
    """The paths of a selection, by plan entries."""
    expect_operator(selection, f"in_place_{head_dim}")
    return ByGrid(selection, lambda path: _pipeline(path, head_dim, compress_ratio, rotate))


@functools.cache
def _pipeline(path: KernelPath, head_dim: int, compress_ratio: int, rotate: bool) -> InPlace:
    if path.name == "torch":
        return functools.partial(in_torch, compress_ratio=compress_ratio, rotate=rotate)
    return InRegisters(path, head_dim, compress_ratio, rotate)


class InRegisters:
    """One program per plan entry."""

    def __init__(self, path: KernelPath, head_dim: int, compress_ratio: int, rotate: bool) -> None:
        from backend_core.launch.triton import KernelLaunch

        variant = in_place_variant(path, head_dim, compress_ratio, rotate)
        self._launch = KernelLaunch(variant.kernel, variant.constexprs, variant.options)

    def __call__(
        self,
        kv: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rope_table: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        expect_kernel_device("kv", kv)
        self._launch.launch(
            (seq_lens.shape[0], 1, 1),
            kv_ptr=kv,
            weight_ptr=weight,
            table_ptr=rope_table,
            seq_len_ptr=seq_lens,
            eps=eps,
            stride_kv_r=kv.stride()[0],
            stride_table_p=rope_table.stride()[0],
        )


def in_torch(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rope_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    compress_ratio: int,
    rotate: bool,
) -> None:
    """By the definition in float64, rounded once, to the dtype of kv."""
    lengths = seq_lens.long()
    rows = ((lengths > 0) & (lengths % compress_ratio == 0)).nonzero().flatten()
    if not len(rows):
        return
    done = reference.finish(
        kv[rows].double(),
        lengths[rows] - compress_ratio,
        weight,
        rope_table,
        eps=eps,
        rope_layout="interleaved",
        rotate=rotate,
    )
    kv[rows] = done.float().to(kv.dtype)
