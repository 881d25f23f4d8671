"""The launch parameters of block-sparse attention; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        named_turns: they hand over by a hardware barrier instead of one in shared memory.
        early_softmax: a block's weights are computed before the products with the values of the
            block before it are awaited.
        lazy_rescale: warps whose rows all keep their maxima leave their output as it is.
        keys_ahead: keys of a block are loaded before the values of the block before it.
    """

    block_n: int
    num_stages: int
    registers: int
    ping_pong: bool
    named_turns: bool = False
    early_softmax: bool = False
    lazy_rescale: bool = False
    keys_ahead: bool = False

    def __post_init__(self) -> None:
        if self.block_n not in (64, 128):
            raise ValueError(f"block_n must be 64 or 128, got {self.block_n}")
        if self.named_turns and not self.ping_pong:
            raise ValueError("named_turns must come with ping_pong, whose turns they are")

    @property
    def form(self) -> str:
        """The kernel's FORM: names of what is on, in a fixed order."""
        names = ("ping_pong", "named_turns", "early_softmax", "lazy_rescale", "keys_ahead")
        return " ".join(name for name in names if getattr(self, name))

    @property
    def block_m(self) -> int:
        """Queries in a tile: two warpgroups of 64."""
        return 128


@dataclass(frozen=True)
class PredictionParams:
    """How a prediction scores pooled blocks and finds those to keep; a table's ``[prediction]``.

    Attributes:
        product: of mean queries and mean keys: "exact" to fp32 (three TF32 products, on HIP fp32
            ones), "fp16x3" with 22 bits of each factor in three products, or "fp16" with 11 in
            one. The two suppose means below 65,504.
        centre: what is taken out of all keys, which no softmax over keys sees: their "mean", or
            the block in their "middle", which needs no kernel of its own. Prediction alone; the
            kernels that quantise have the mean.
        search: the threshold on "weights", or for a share of the blocks on their logarithms
            ("logits"), with one instruction less to count a block.
        score_rows, score_cols, score_warps: tiles and blocks that a program scores, and its warps.
        order_step: rows that a program compares with its own at a time to order the work.
    """

    product: Literal["exact", "fp16x3", "fp16"] = "exact"
    centre: Literal["mean", "middle"] = "mean"
    search: Literal["weights", "logits"] = "weights"
    score_rows: int = 128
    score_cols: int = 64
    score_warps: int = 4
    order_step: int = 64

    def __post_init__(self) -> None:
        for name, allowed in (
            ("score_rows", (64, 128)),
            ("score_cols", (32, 64, 128)),
            ("score_warps", (4, 8)),
            ("order_step", (64, 128, 256)),
        ):
            if (value := getattr(self, name)) not in allowed:
                choices = " or ".join(str(x) for x in allowed)
                raise ValueError(f"{name} must be {choices}, got {value}")


@dataclass(frozen=True)
class Int8PrefillParams(TritonPrefillParams):
    """8-bit attention in Triton.

    Attributes:
        exponent: where a block's scale and the conversion of q k^T are paid: "scaled" for every
            element; "folded": the scale goes into the factor of the exponent; "biased": the
            conversion goes into the accumulator's first value as well. Only where a block of keys
            has one scale and queries keep their mean, else "scaled".
        prediction: the table's section.
    """

    exponent: Literal["scaled", "folded", "biased"] = "scaled"
    prediction: PredictionParams = PredictionParams()


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
        paths={"torch": NoParams, "triton": Int8PrefillParams},
    ),
)
SECTIONS = {"prediction": PredictionParams}
