"""The launch parameters of each path, and what the family's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller
from typing import Literal

from backend_core.tables.schema import Operator, TableSchema


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

    @property
    def blocks(self) -> tuple[int, int]:
        return self.block_m, self.block_n


@dataclass(frozen=True)
class GluonParams:
    """Block-sparse attention in Gluon for Hopper: one warp loads, two warpgroups compute."""

    blocks = (128, 128)
    """Queries in a tile, of two warpgroups, and keys in a block, in plans made for this path."""


@dataclass(frozen=True)
class PredictionParams:
    """How a prediction scores pooled blocks and finds those to keep; a table's ``[prediction]``.

    Attributes:
        product: of mean queries and mean keys: "exact" to fp32 (three TF32 products, on HIP fp32
            ones), or "fp16x3" with 22 bits of each factor in three products, which supposes means
            below 65,504.
        centre: what is taken out of all keys, which no softmax over keys sees: their "mean", or
            the block in their "middle", which needs no kernel of its own. Prediction alone; the
            kernels that quantise have the mean.
        search: the threshold on "weights", or for a share of the blocks on their logarithms
            ("logits"), with one instruction less to count a block.
        order_step: rows that a program compares with its own at a time to order the work.
    """

    product: Literal["exact", "fp16x3"] = "exact"
    centre: Literal["mean", "middle"] = "mean"
    search: Literal["weights", "logits"] = "weights"
    order_step: int = 64

    def __post_init__(self) -> None:
        if self.order_step not in (64, 256):
            raise ValueError(f"order_step must be 64 or 256, got {self.order_step}")


@dataclass(frozen=True)
class Int8Params(TritonParams):
    """8-bit attention in Triton.

    Attributes:
        exponent: where a block's scale and the conversion of q k^T are paid: "scaled" for every
            element; "biased": the scale goes into the factor of the exponent, and the conversion
            into the accumulator's first value. Only where a block of keys has one scale, else
            "scaled".
        prediction: the table's section.
    """

    exponent: Literal["scaled", "biased"] = "scaled"
    prediction: PredictionParams = PredictionParams()


GRID = "query tiles times heads"
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
        ),
        Operator(
            name="block_sparse_int8",
            grid=GRID,
            paths={"torch": TorchParams, "triton": Int8Params},
            folder="block_sparse_backend.dense8",
            requires=methodcaller("requires"),
        ),
    ),
    sections={"prediction": PredictionParams},
)
