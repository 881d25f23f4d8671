"""The indexer's queries in the format in which its keys are cached, one launch or torch."""

from __future__ import annotations

import functools
from typing import Protocol, TypeAlias

import torch

from backend_core.contracts import expect_kernel_device, expect_near
from backend_core.tables.select import KernelPath, PathSelection
from backend_core.target import Target
from dsv4_backend import reference
from dsv4_backend.compressor.bound import ByGrid
from dsv4_backend.compressor.variants import queries_variant
from dsv4_backend.selection import expect_operator, select_paths
from dsv4_backend.spec import CompressorSpec

OPERATOR = "queries"
Queries: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Codes, scales and the weights of the heads' scores."""


class QuantiseQueries(Protocol):
    """One kernel path of the operator."""

    def __call__(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        rope_table: torch.Tensor,
        weights: torch.Tensor,
        softmax_scale: float,
        head_scale: float,
    ) -> Queries: ...


@functools.cache
def pipelines(target: Target, spec: CompressorSpec) -> ByGrid[QuantiseQueries]:
    """The operator's paths on a target, by tokens times heads."""
    return pipelines_of(select_paths(target, OPERATOR), spec)


def pipelines_of(selection: PathSelection, spec: CompressorSpec) -> ByGrid[QuantiseQueries]:
    """The paths of a selection, by tokens times heads."""
    expect_operator(selection, OPERATOR)
    found = ByGrid(selection, lambda path: _pipeline(path, spec))
    kernels = tuple(p.launch for p in found.values if isinstance(p, InRegisters))
    for kernel in kernels:
        kernel.alternatives = kernels
    return found


@functools.cache
def _pipeline(path: KernelPath, spec: CompressorSpec) -> QuantiseQueries:
    if path.name == "torch":
        return functools.partial(in_torch, spec)
    return InRegisters(path, spec)


class InRegisters:
    """One program per token and ``heads`` of its heads."""

    def __init__(self, path: KernelPath, spec: CompressorSpec) -> None:
        from backend_core.launch.triton import KernelLaunch

        variant = queries_variant(path, spec)
        self.launch = KernelLaunch(variant.kernel, variant.constexprs, variant.options)
        self._heads: int = path.params.heads
        self._is_fp4 = spec.record.encoding == "indexer_mxfp4"

    def __call__(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        rope_table: torch.Tensor,
        weights: torch.Tensor,
        softmax_scale: float,
        head_scale: float,
    ) -> Queries:
        expect_kernel_device("q", q)
        expect_near("q", q, 1)
        tokens, heads, dim = q.shape
        width = dim // 2 if self._is_fp4 else dim
        codes = q.new_empty(tokens, heads, width, dtype=torch.uint8)
        scales = q.new_empty(tokens, heads, dim // 32, dtype=torch.uint8) if self._is_fp4 else None
        out = q.new_empty(tokens, heads, dtype=torch.float32)
        stride_q_t, stride_q_h, _ = q.stride()
        self.launch.launch(
            (tokens, -(-heads // self._heads), 1),
            q_ptr=q,
            position_ptr=positions,
            table_ptr=rope_table,
            weight_ptr=weights,
            code_ptr=codes,
            scale_ptr=scales,
            out_ptr=out,
            num_heads=heads,
            softmax_scale=softmax_scale,
            head_scale=head_scale,
            stride_q_t=stride_q_t,
            stride_q_h=stride_q_h,
            stride_table_p=rope_table.stride()[0],
            stride_weight_t=weights.stride()[0],
        )
        return codes, scales, out


def in_torch(
    spec: CompressorSpec,
    q: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
) -> Queries:
    """By the definition, in float64."""
    tokens, heads, dim = q.shape
    rows = reference.rope(
        q.double().reshape(-1, dim),
        rope_table,
        positions.repeat_interleave(heads),
        spec.rope_layout,
    )
    if spec.rotate:
        rows = reference.hadamard(rows)
    data, scales = reference.quantise(rows, spec)
    codes = data.view(tokens, heads, data.shape[1])
    out = weights.double() * softmax_scale * head_scale
    if spec.record.encoding == "indexer_mxfp4":
        return codes, scales.view(tokens, heads, scales.shape[1]), out.float()
    scale = scales.contiguous().view(torch.float32).view(tokens, heads)
    return codes, None, (out * scale).float()
