"""The launch parameters of block-sparse attention; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from backend_core.tables.schema import NoParams, Operator


@dataclass(frozen=True)
class TritonPrefillParams:
    """Block-sparse attention in Triton.

    Attributes:
        block_m, block_n: queries in a tile and keys in a block, in plans made for this path.
        num_warps, num_stages: of the kernel; ``num_stages`` blocks of keys are in flight.
        max_registers: of a thread, 0 for no limit; 168 let three programs of four warps share an
            SM, which mask hooks would otherwise exceed.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __post_init__(self) -> None:
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n)):
            if value not in (16, 32, 64, 128):
                raise ValueError(f"{name} must be 16, 32, 64 or 128, got {value}")


@dataclass(frozen=True)
class GluonPrefillParams:
    """Block-sparse attention in Gluon for Hopper: one warp loads, two warpgroups compute.

    Attributes:
        block_n: keys in a block, 64 or 128, in plans made for this path; a tile has 128 queries.
        num_stages: blocks of keys in flight.
        registers: of a thread of the computing warpgroups.
        ping_pong: the warpgroups issue their products in turns.
    """

    block_n: int
    num_stages: int
    registers: int
    ping_pong: bool

    def __post_init__(self) -> None:
        if self.block_n not in (64, 128):
            raise ValueError(f"block_n must be 64 or 128, got {self.block_n}")

    @property
    def block_m(self) -> int:
        """Queries in a tile: two warpgroups of 64."""
        return 128


GRID = "query tiles times heads"
OPERATORS = (
    Operator(
        name="block_sparse",
        grid=GRID,
        paths={
            "torch": NoParams,
            "triton": TritonPrefillParams,
            "gluon": GluonPrefillParams,
            "gluon_packed": GluonPrefillParams,
        },
    ),
    Operator(
        name="block_sparse_int8",
        grid=GRID,
        paths={"torch": NoParams, "triton": TritonPrefillParams},
    ),
)
