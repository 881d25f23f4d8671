"""The launch parameters of each path, and what the family's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller

from backend_core.tables.schema import NoParams, Operator, TableSchema


@dataclass(frozen=True)
class TorchParams:
    """Attention over blocks in torch, which takes any."""

    blocks = (64, 64)
    """Queries in a tile and keys in a block, in plans made for this path."""


@dataclass(frozen=True)
class TritonParams:
    """Block-sparse attention in Triton.

    Attributes:
        block_m, block_n: queries in a tile and keys in a block, in plans made for this path.
        num_warps, num_stages: of the kernel; ``num_stages`` blocks of keys are in flight.
        max_registers: of a thread, 0 for no limit; 168 let three programs of four warps share an
            SM, which mask hooks would otherwise exceed.
        max_registers_64: the same of heads of 64 channels without a mask, whose values are in e4m3;
            128 let four programs share an SM.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0
    max_registers_64: int = 0

    def __post_init__(self) -> None:
        for name, value in (("block_m", self.block_m), ("block_n", self.block_n)):
            if value not in (16, 32, 64, 128):
                raise ValueError(f"{name} must be 16, 32, 64 or 128, got {value}")

    @property
    def blocks(self) -> tuple[int, int]:
        return self.block_m, self.block_n


@dataclass(frozen=True)
class GluonParams:
    """Block-sparse attention in Gluon for Hopper: one warp loads, two warpgroups compute."""

    blocks = (128, 128)
    """Queries in a tile, of two warpgroups, and keys in a block, in plans made for this path."""


GRID = "query tiles times heads"
_ANY = "any_head_size any_tile packed"
_EITHER = {"torch": NoParams, "triton": NoParams}
TABLES = TableSchema(
    family="block_sparse",
    operators=(
        Operator(
            name="block_sparse",
            grid=GRID,
            paths={
                "torch": TorchParams,
                "triton": TritonParams,
                "gluon": GluonParams,
            },
            folder="block_sparse_backend.dense16",
            requires=methodcaller("requires"),
            features={"torch": _ANY, "triton": _ANY, "gluon": "packed"},
        ),
        Operator(
            name="block_sparse_int8",
            grid=GRID,
            paths={"torch": TorchParams, "triton": TritonParams},
            folder="block_sparse_backend.dense8",
            requires=methodcaller("requires"),
            features=dict.fromkeys(_EITHER, "any_tile e4m3_values"),
        ),
        Operator(
            name="quantise",
            grid=GRID,
            paths=_EITHER,
            folder="block_sparse_backend.quantise",
            requires=methodcaller("requires"),
            features=dict.fromkeys(_EITHER, "e4m3_values"),
        ),
        Operator(name="predict", grid=GRID, paths=_EITHER, folder="block_sparse_backend.predict"),
        Operator(name="plan", grid=GRID, paths=_EITHER, folder="block_sparse_backend.plan"),
    ),
)
