"""Filling the work list of a plan: a kernel for each path, and torch on a CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from mla_backend.plan.split_kv import CANDIDATES, split_kv
from mla_backend.step_plan import MlaPlan

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

SM90_SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "split_plan.cu"
PARAMS = CudaParams(
    (
        ("lengths", "const int*"),  # [tiles] tokens; negative: the tile is not there
        ("work", "int4*"),  # [ctas, 2]: first tile, first block, last tile, end block; first split
        ("num_splits", "int*"),  # [tiles + 1], a prefix sum
        ("merges", "int*"),  # [1 + requests]: how many requests combine has to merge, and which
        ("prefix_tile", "const int*"),  # [requests] or null: >= 0 where a prefix is shared
        ("tiles", "int"),
        ("prefix_tiles", "int"),  # of the second list: all its arrays follow the first one's
        ("prefix_slot", "int"),  # the first of the second list
        ("requests", "int"),  # the first tiles are the requests' own
        ("ctas", "int"),
        ("overhead", "int"),
        ("min_blocks", "int"),
    )
)
OVERHEAD, MIN_BLOCKS = 1, 1
"""The cost of each query tile that a CTA touches, and the fewest blocks of a split."""


def fill_in_torch(plan: MlaPlan, tokens: torch.Tensor) -> None:
    """The schedule in torch, which reads the host."""
    work, num_splits = split_kv(tokens, plan.num_ctas, OVERHEAD, MIN_BLOCKS)
    with torch.inference_mode():  # which the plan may have been made in
        plan.work.copy_(work)
        plan.num_splits.copy_(num_splits)


def fill_sm90(query_rows: int, plan: MlaPlan, tokens: torch.Tensor) -> None:
    """One launch of the planner in CUDA C++, of ``tokens`` in each tile."""
    assert plan.merges is not None
    requests, prefix = plan.requests, plan.prefix
    packed = PARAMS.pack(
        lengths=tokens.data_ptr(),
        work=plan.work.data_ptr(),
        num_splits=plan.num_splits.data_ptr(),
        merges=plan.merges.data_ptr(),
        prefix_tile=0 if prefix is None else prefix.prefix_tile.data_ptr(),
        tiles=requests,
        prefix_tiles=0 if prefix is None else prefix.num_prefix_tiles,
        prefix_slot=prefix_slot(requests + plan.num_ctas, query_rows),
        requests=requests,
        ctas=plan.num_ctas,
        overhead=OVERHEAD,
        min_blocks=MIN_BLOCKS,
    )
    threads = 544 if tokens.shape[0] <= 544 else 1024  # a warp per candidate
    _sm90_kernel()(1 if prefix is None else 2, threads, packed, pdl=True)


def prefix_slot(own_slots: int, query_rows: int) -> int:
    """The first slot of 64 rows behind ``own_slots`` slots of a request's rows."""
    return -(-own_slots * query_rows // 64)


def plan_split_kv(plan: MlaPlan, lengths: torch.Tensor) -> None:
    """One launch of the Triton planner."""
    tiles, ctas = lengths.shape[0], plan.num_ctas
    _split_kernel(power_of_two(tiles), power_of_two(ctas)).launch(
        (1, 1, 1),
        lengths_ptr=lengths,
        work_ptr=plan.work,
        num_splits_ptr=plan.num_splits,
        scratch_ptr=plan.starts,
        tiles=tiles,
        ctas=ctas,
        overhead=OVERHEAD,
        min_blocks=MIN_BLOCKS,
    )


def power_of_two(x: int) -> int:
    return max(1 << (x - 1).bit_length(), 2)


@functools.cache
def _split_kernel(block_t: int, block_ctas: int) -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.split_plan import split_plan_kernel

    constexprs = {
        "BLOCK_T": block_t,
        "BLOCK_CTAS": block_ctas,
        "STEPS": block_t.bit_length(),
        "CANDIDATES": CANDIDATES,
    }
    return KernelLaunch(split_plan_kernel, constexprs, {"num_warps": 8})


@functools.cache
def _sm90_kernel() -> CudaKernel:
    return CudaKernel(SM90_SOURCE, "split_plan", PARAMS, {})
