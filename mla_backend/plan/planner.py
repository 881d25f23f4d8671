"""Making the plan of a step: on a GPU by kernels, without a host sync; on a CPU in torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend_core import contracts
from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.operator import Selection
from backend_core.tables.schema import KernelPath
from mla_backend.contract.mla_decode import expect_heads
from mla_backend.decode import MlaPath
from mla_backend.launch_params import Sm90MlaParams, TritonMlaParams
from mla_backend.plan.split_kv import CANDIDATES, split_kv
from mla_backend.spec import MlaSpec
from mla_backend.step_plan import MlaPlan, SharedPrefix

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
MAX_TILES = 4095
OVERHEAD, MIN_BLOCKS = 1, 1
"""Of plans in torch and Triton: what a program pays for each query tile that it touches, and the
fewest blocks of a split."""
MAX_PREFIX_REQUESTS = 128
"""As many as were measured: the search compares each request with each."""


class MlaPlanner:
    """Plans the steps of one kind of layer.

    Args:
        selection: the paths of the layer (``api.select_mla_decode``).
        shared_prefix_tokens: > 0: requests that share at least so many leading tokens, in whole
            pages at the head of their block tables, read them once per 64 query rows. On a CPU,
            whose path computes each request on its own, each reads its own, with the same result.
        shared_prefix_requests: the fewest requests that share a prefix; fewer read their own.

    Raises:
        ValueError: prefixes are shared, and a request has more than 64 query rows, or a prefix is
            to be shared by fewer than 2 requests.
    """

    def __init__(
        self,
        selection: Selection[MlaSpec, MlaPath],
        *,
        shared_prefix_tokens: int = 0,
        shared_prefix_requests: int = 2,
    ) -> None:
        if shared_prefix_tokens and selection.spec.query_rows > 64:
            raise ValueError(
                "shared prefixes need at most 64 query rows of a request, got"
                f" {selection.spec.query_rows}"
            )
        if shared_prefix_requests < 2:
            raise ValueError(
                f"shared_prefix_requests must be at least 2, got {shared_prefix_requests}"
            )
        self.selection = selection
        self.spec = selection.spec
        self._prefix_tokens = shared_prefix_tokens
        self._prefix_requests = shared_prefix_requests

    def plan(
        self,
        lengths: torch.Tensor,
        block_table: torch.Tensor | None = None,
        *,
        out: MlaPlan | None = None,
    ) -> MlaPlan:
        """The plan of one step.

        Args:
            lengths: ``[requests]`` int32 tokens in the cache, those of the queries included; 0 is
                an empty request. Read by the kernels that use the plan, so keep it as it is.
            block_table: ``[requests, pages]`` int32; needed where prefixes are shared.
            out: an earlier plan of as many requests, by a planner of the same query tokens, to be
                written again in place (CUDA graphs).

        Raises:
            ValueError: an input is not as described; nothing has been written then.
        """
        if is_elsewhere(lengths):
            return run_there(lengths, MlaPlanner.plan, locals())
        contracts.expect_dtype("lengths", lengths, torch.int32)
        contracts.expect_shape("lengths", lengths, ("requests",))
        contracts.expect_stride("lengths", lengths, 0, 1)
        requests = lengths.shape[0]
        if not 1 <= requests <= MAX_TILES:
            raise ValueError(f"lengths must have 1 to {MAX_TILES} requests, got {requests}")
        if self._prefix_tokens:
            if block_table is None:
                raise ValueError("block_table must be given where prefixes are shared, got None")
            contracts.expect_dtype("block_table", block_table, torch.int32)
            contracts.expect_shape("block_table", block_table, (requests, "pages"))
            contracts.expect_stride("block_table", block_table, 1, 1)
            contracts.expect_device("block_table", block_table, lengths.device)
            if requests > MAX_PREFIX_REQUESTS:
                raise ValueError(
                    f"lengths must have at most {MAX_PREFIX_REQUESTS} requests where prefixes are"
                    f" shared, got {requests}"
                )
        path = self.selection.row(requests)
        self.selection.expect_device("lengths", lengths)
        plan = self._allocate(lengths, path) if out is None else out
        if out is not None and (
            out.lengths.data_ptr() != lengths.data_ptr() or out.requests != requests
        ):
            raise ValueError("out must be a plan of the same lengths tensor, got one of another")
        if out is not None and (out.prefix is None) == self._shares_prefixes(path):
            wanted, got = ("with", "without") if out.prefix is None else ("without", "with")
            raise ValueError(f"out must be a plan {wanted} shared prefixes, got one {got}")
        if out is not None:
            self._expect_own(out, path)
        contracts.expect_device("out", plan.work, lengths.device)
        expect_heads("out", None if plan.prefix is None else plan.prefix.num_heads, self.spec)
        if plan.prefix is not None and block_table is not None:
            _find_prefixes(
                plan,
                plan.prefix,
                block_table,
                self.spec.page_size,
                self.spec.query_rows,
                self._prefix_tokens,
                self._prefix_requests,
            )
        self._fill(plan, path)
        return plan

    def _expect_own(self, out: MlaPlan, path: KernelPath) -> None:
        """Require a plan as this planner makes them: runs go by what it says."""
        wanted = (self.spec.query_tokens, self._lists_prefixes(path))
        got = (out.query_tokens, out.merges is not None)
        if got != wanted:
            raise ValueError(
                f"out must be a plan with the query tokens and list of merges {wanted}, got {got}"
            )

    def _allocate(self, lengths: torch.Tensor, path: KernelPath) -> MlaPlan:
        requests, rows = lengths.shape[0], self.spec.query_rows
        ctas = self._num_ctas(path)
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=lengths.device)
        prefix = None
        tiles, lists = requests, 1
        slots = tiles + ctas
        work = zeros(ctas, 8)
        if self._shares_prefixes(path):
            # a group of n requests has ceil(n rows / 64) tiles, and n is at least 2
            prefix_tiles = requests // 2 + -(-requests * rows // 64)
            tiles += prefix_tiles
            slots += prefix_tiles
            if self._lists_prefixes(path):
                lists = 2
                work = zeros(2 * ctas, 8)
                slots = _prefix_slot(requests + ctas, rows) + prefix_tiles + ctas
            prefix = SharedPrefix(
                zeros(tiles, 8),
                zeros(tiles),
                zeros(2 * requests),
                zeros(requests),
                zeros(requests),
                prefix_tiles,
                zeros(requests),
                zeros(requests),
                self.spec.num_heads,
                work[ctas:] if lists == 2 else None,
            )
        return MlaPlan(
            lengths,
            work[:ctas],
            zeros(tiles + lists),
            self.spec.query_tokens,
            slots,
            prefix,
            zeros(1 + requests) if self._lists_prefixes(path) else None,
            zeros(2, tiles),
        )

    def _shares_prefixes(self, path: KernelPath) -> bool:
        return self._prefix_tokens > 0 and path.is_kernel

    def _lists_prefixes(self, path: KernelPath) -> bool:
        """Whether prefixes have a list of their own, and requests to merge are listed."""
        return isinstance(path.params, Sm90MlaParams)

    def _num_ctas(self, path: KernelPath) -> int:
        row_tiles = 1 if self._prefix_tokens else -(-self.spec.query_rows // 64)
        sms = self.selection.target.num_sms
        if isinstance(path.params, TritonMlaParams):
            blocks = -(-min(self.spec.query_rows, 64) // path.params.block_rows)
            row_tiles *= blocks
        return max(sms // row_tiles, 1)

    def _fill(self, plan: MlaPlan, path: KernelPath) -> None:
        tokens = plan.lengths if plan.prefix is None else plan.prefix.tile_lengths
        if not (tokens.is_cuda or path.is_kernel):
            work, num_splits = split_kv(tokens, plan.num_ctas, OVERHEAD, MIN_BLOCKS)
            with torch.inference_mode():  # which the plan may have been made in
                plan.work.copy_(work)
                plan.num_splits.copy_(num_splits)
        elif isinstance(path.params, Sm90MlaParams):
            self._fill_sm90(plan, tokens, path.params)
        else:
            plan_split_kv(tokens, plan, OVERHEAD, MIN_BLOCKS)

    def _fill_sm90(self, plan: MlaPlan, tokens: torch.Tensor, params: Sm90MlaParams) -> None:
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
            prefix_slot=_prefix_slot(requests + plan.num_ctas, self.spec.query_rows),
            requests=requests,
            ctas=plan.num_ctas,
            overhead=params.overhead,
            min_blocks=params.min_blocks,
        )
        threads = 544 if tokens.shape[0] <= 544 else 1024  # a warp per candidate
        _sm90_kernel()(1 if prefix is None else 2, threads, packed, pdl=True)


def _prefix_slot(own_slots: int, query_rows: int) -> int:
    """The first slot of 64 rows behind ``own_slots`` slots of a request's rows."""
    return -(-own_slots * query_rows // 64)


def plan_split_kv(lengths: torch.Tensor, plan: MlaPlan, overhead: int, min_blocks: int) -> None:
    """One launch of the Triton planner."""
    tiles, ctas = lengths.shape[0], plan.num_ctas
    _split_kernel(_power_of_two(tiles), _power_of_two(ctas)).launch(
        (1, 1, 1),
        lengths_ptr=lengths,
        work_ptr=plan.work,
        num_splits_ptr=plan.num_splits,
        scratch_ptr=plan.starts,
        tiles=tiles,
        ctas=ctas,
        overhead=overhead,
        min_blocks=min_blocks,
    )


def _find_prefixes(
    plan: MlaPlan,
    prefix: SharedPrefix,
    block_table: torch.Tensor,
    page_size: int,
    query_rows: int,
    min_tokens: int,
    min_requests: int,
) -> None:
    requests = plan.requests
    size = _power_of_two(requests)
    # tiles of a list of their own are counted behind the end of the requests' own
    first = requests if prefix.work is None else requests + 1
    leaders, tiles = _prefix_kernels(page_size, size, _power_of_two(prefix.num_prefix_tiles))
    leaders.launch(
        (requests, 1, 1),
        block_table_ptr=block_table,
        lengths_ptr=plan.lengths,
        leader_ptr=prefix.leader,
        shared_ptr=prefix.shared,
        requests=requests,
        query_tokens=plan.query_tokens,
    )
    tiles.launch(
        (1, 1, 1),
        lengths_ptr=plan.lengths,
        leader_ptr=prefix.leader,
        shared_ptr=prefix.shared,
        tiles_ptr=prefix.tiles,
        tile_lengths_ptr=prefix.tile_lengths,
        members_ptr=prefix.members,
        prefix_tile_ptr=prefix.prefix_tile,
        prefix_row_ptr=prefix.prefix_row,
        requests=requests,
        query_rows=query_rows,
        prefix_tiles=prefix.num_prefix_tiles,
        first_prefix_tile=first,
        min_tokens=min_tokens,
        min_requests=min_requests,
    )


def _power_of_two(x: int) -> int:
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
def _prefix_kernels(page_size: int, block_t: int, tiles: int) -> tuple[KernelLaunch, KernelLaunch]:
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.shared_prefix import find_leaders_kernel, two_level_tiles_kernel

    leaders = {"PAGE_SIZE": page_size, "BLOCK_T": block_t, "BLOCK_PAGES": 256}
    return (
        KernelLaunch(find_leaders_kernel, leaders, {"num_warps": 4}, axes={"block_table": "r."}),
        KernelLaunch(
            two_level_tiles_kernel,
            {"BLOCK_T": block_t, "BLOCK_TILES": tiles},
            {"num_warps": 8 if block_t < 128 else 16},
        ),
    )


@functools.cache
def _sm90_kernel() -> CudaKernel:
    return CudaKernel(SM90_SOURCE, "split_plan", PARAMS, {})
