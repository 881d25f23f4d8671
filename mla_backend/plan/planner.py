"""Making the plan of a step: on a GPU by kernels, without a host sync; on a CPU in torch."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import torch

from backend_core import contracts
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.operator import Selection
from backend_core.tables.schema import Row
from mla_backend.contract.mla_decode import expect_heads
from mla_backend.decode import MlaPath, Planning
from mla_backend.plan.fill import power_of_two, prefix_slot
from mla_backend.spec import MlaSpec
from mla_backend.step_plan import MlaPlan, SharedPrefix

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

MAX_TILES = 4095
MAX_PREFIX_REQUESTS = 128
"""Most requests that were measured: the search compares each with each."""


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
        self._plannings: dict[Row, Planning] = {}

    def _planning(self, row: Row) -> Planning:
        found = self._plannings.get(row)
        if found is None:
            module = importlib.import_module(f"{self.selection.operator.folder}.{row.name}")
            sms, shares = self.selection.target.num_sms, self._prefix_tokens > 0
            found = self._plannings[row] = module.plan(row, self.spec, sms, shares)
        return found

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
        planning = self._planning(self.selection.row(requests))
        self.selection.expect_device("lengths", lengths)
        plan = self._allocate(lengths, planning) if out is None else out
        if out is not None and (
            out.lengths.data_ptr() != lengths.data_ptr() or out.requests != requests
        ):
            raise ValueError("out must be a plan of the same lengths tensor, got one of another")
        if out is not None and (out.prefix is None) == planning.shares_prefixes:
            wanted, got = ("with", "without") if out.prefix is None else ("without", "with")
            raise ValueError(f"out must be a plan {wanted} shared prefixes, got one {got}")
        if out is not None:
            self._expect_own(out, planning)
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
        planning.fill(plan, plan.lengths if plan.prefix is None else plan.prefix.tile_lengths)
        return plan

    def _expect_own(self, out: MlaPlan, planning: Planning) -> None:
        """Require a plan as this planner makes them: runs go by what it says."""
        wanted = (self.spec.query_tokens, planning.lists_prefixes)
        got = (out.query_tokens, out.merges is not None)
        if got != wanted:
            raise ValueError(
                f"out must be a plan with the query tokens and list of merges {wanted}, got {got}"
            )

    def _allocate(self, lengths: torch.Tensor, planning: Planning) -> MlaPlan:
        requests, rows = lengths.shape[0], self.spec.query_rows
        ctas = planning.num_ctas
        zeros = functools.partial(torch.zeros, dtype=torch.int32, device=lengths.device)
        prefix = None
        tiles, lists = requests, 1
        slots = tiles + ctas
        work = zeros(ctas, 8)
        if planning.shares_prefixes:
            # a group of n requests has ceil(n rows / 64) tiles, and n is at least 2
            prefix_tiles = requests // 2 + -(-requests * rows // 64)
            tiles += prefix_tiles
            slots += prefix_tiles
            if planning.lists_prefixes:
                lists = 2
                work = zeros(2 * ctas, 8)
                slots = prefix_slot(requests + ctas, rows) + prefix_tiles + ctas
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
            zeros(1 + requests) if planning.lists_prefixes else None,
            zeros(2, tiles),
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
    size = power_of_two(requests)
    # tiles of a list of their own are counted behind the end of the requests' own
    first = requests if prefix.work is None else requests + 1
    leaders, tiles = _prefix_kernels(page_size, size, power_of_two(prefix.num_prefix_tiles))
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
