"""The launch parameters of each softmax-attention path, and what the family's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from backend_core.tables.schema import NoParams, Operator, TableSchema
from softmax_backend.launch_params_prefill import OPERATORS as PREFILL_OPERATORS
from softmax_backend.launch_params_prefill import SECTIONS as PREFILL_SECTIONS
from softmax_backend.launch_params_sparse import OPERATORS as SPARSE_OPERATORS

Merge = Literal["combine", "last", "together"]
MERGES: tuple[Merge, ...] = get_args(Merge)


@dataclass(frozen=True)
class TritonMlaParams:
    """MLA decode in Triton.

    Attributes:
        programs_per_sm: rows of the work list for each SM or compute unit.
        block_kv: tokens per step of the main loop: 16, 32 or 64.
        block_rows: most query rows of a program: 16 or 32.
        num_warps, num_stages: of the main kernel.
        overhead: what a program pays for each query tile that it touches, in blocks of 64 tokens.
        min_blocks: fewest blocks of a split.
    """

    programs_per_sm: int
    block_kv: int
    block_rows: int
    num_warps: int
    num_stages: int
    overhead: int
    min_blocks: int

    def __post_init__(self) -> None:
        if self.block_kv not in (16, 32, 64):
            raise ValueError(f"block_kv must be 16, 32 or 64, got {self.block_kv}")
        if self.block_rows not in (16, 32):
            raise ValueError(f"block_rows must be 16 or 32, got {self.block_rows}")
        check_plan(self.overhead, self.min_blocks)


@dataclass(frozen=True)
class Sm90MlaParams:
    """MLA decode in CUDA C++ for Hopper.

    Attributes:
        overhead: what a CTA pays for each query tile that it touches, in blocks of 64 tokens.
        min_blocks: fewest blocks of a split.
        evict_first: the cache is read with the L2 hint of data that is read once.
        merge: who merges the splits of a request: ``"combine"``, a launch of its own; ``"last"``,
            the CTA that brings the last one; ``"together"``, all that have one, each a share of the
            rows, for which they wait for each other. The result is the same to the last bit
            whichever comes last. Shared prefixes and fixed splits have combine in any case.
        prefix_overhead: ``overhead`` of plans with shared prefixes, whose splits combine merges for
            64 rows at a time; 0 is as much as ``overhead``.
        rope_warp: the keys' RoPE parts are fetched by a warp of their own and wait for no latent
            part. For 9 to 16 query rows the ring then has room for three blocks instead of two and
            a half.
        prefetch_blocks: how far ahead of the ring blocks are asked for in the L2 cache, 0 to 8;
            where it is not 0, pages are looked up eight blocks ahead as well. 0 with ``rope_warp``,
            whose two warps have no registers for it.
    """

    overhead: int
    min_blocks: int
    evict_first: bool
    merge: Merge = "combine"
    prefix_overhead: int = 0
    rope_warp: bool = False
    prefetch_blocks: int = 0

    def __post_init__(self) -> None:
        if self.merge not in MERGES:
            raise ValueError(f"merge must be one of {', '.join(MERGES)}, got {self.merge!r}")
        if not 0 <= self.prefetch_blocks <= 8:
            raise ValueError(f"prefetch_blocks must be 0 to 8, got {self.prefetch_blocks}")
        if self.rope_warp and self.prefetch_blocks:
            raise ValueError(
                f"prefetch_blocks must be 0 where rope_warp is true, got {self.prefetch_blocks}"
            )
        check_plan(self.overhead, self.min_blocks)
        if self.prefix_overhead:
            check_plan(self.prefix_overhead, self.min_blocks)


def check_plan(overhead: int, min_blocks: int) -> None:
    """Raises ValueError where the planner's kernels could not serve these."""
    if not 1 <= overhead <= 16:
        raise ValueError(f"overhead must be 1 to 16 blocks, got {overhead}")
    if not 1 <= min_blocks <= 64:
        raise ValueError(f"min_blocks must be 1 to 64, got {min_blocks}")


TABLES = TableSchema(
    family="softmax",
    operators=(
        Operator(
            name="mla_decode",
            grid="requests times query rows of a request (query tokens times heads)",
            paths={"torch": NoParams, "triton": TritonMlaParams, "sm90": Sm90MlaParams},
        ),
        *PREFILL_OPERATORS,
        *SPARSE_OPERATORS,
    ),
    sections=PREFILL_SECTIONS,
)
