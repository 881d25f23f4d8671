"""The launch parameters of each path, and what the family's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller
from typing import Literal

from backend_core.tables.schema import NoParams, Operator, TableSchema
from mla_backend.spec_sparse_mla import SparseMlaSpec


@dataclass(frozen=True)
class TritonMlaParams:
    """MLA decode in Triton.

    Attributes:
        block_kv: tokens per step of the main loop.
        block_rows: most query rows of a program.
        num_warps, num_stages: of the main kernel.
    """

    block_kv: Literal[16, 32, 64]
    block_rows: Literal[16, 32]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Sm90MlaParams:
    """MLA decode in CUDA C++ for Hopper.

    Attributes:
        shared_requests, shared_tokens: in an engine, steps of at least so many requests look for
            prompts that as many of them share, of at least so many tokens; 0 looks for none.
    """

    shared_requests: int = 0
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.shared_requests > 0) != (self.shared_tokens > 0) or self.shared_requests == 1:
            raise ValueError(
                "shared_requests and shared_tokens must both be 0, or at least 2 requests and 1"
                f" token, got {self.shared_requests} and {self.shared_tokens}"
            )


@dataclass(frozen=True)
class TritonSparseMlaParams:
    """Sparse MLA in Triton.

    Attributes:
        block_kv: rows per step of the main loop.
        block_rows: most heads of a program.
        num_warps, num_stages: of the kernel.
        decode: how e4m3 becomes the products' operand: ``"plain"`` arithmetic, or packed
            instructions of sm_90 and later that give bf16 (``"bf16"``).
    """

    block_kv: Literal[16, 32, 64]
    block_rows: Literal[16, 32, 64]
    num_warps: int
    num_stages: int
    decode: Literal["plain", "bf16"]


@dataclass(frozen=True)
class GluonSparseMlaParams:
    """Sparse MLA in Gluon for Hopper: some warps fetch, one or two warpgroups compute.

    Attributes:
        max_heads: most heads of a work item.
        fetch_warps: that fetch and dequantise records; rows of bf16 are copied by 4.
        fetch_registers: of each of their threads.
    """

    max_heads: Literal[16, 32, 64]
    fetch_warps: Literal[4, 8]
    fetch_registers: int


_ROWS = "8_rows 16_rows 32_rows 1024_rows"
_ANY = f"{_ROWS} any_dtype any_page_size"
_ANY_SPARSE = "16_heads 32_heads 64_heads 128_heads fp8_ds_mla_cache bf16_rows_cache"
TABLES = TableSchema(
    family="mla",
    operators=(
        Operator(
            name="mla_decode",
            grid="requests",
            paths={"torch": NoParams, "triton": TritonMlaParams, "sm90": Sm90MlaParams},
            folder="mla_backend.decode",
            requires=methodcaller("requires"),
            features={"torch": _ANY, "triton": _ANY, "sm90": _ROWS},
        ),
        Operator(
            name="sparse_mla",
            grid="query tokens",
            paths={
                "torch": NoParams,
                "triton": TritonSparseMlaParams,
                "gluon_sm90": GluonSparseMlaParams,
            },
            folder="mla_backend.sparse",
            requires=SparseMlaSpec.requires,
            features=dict.fromkeys(("torch", "triton", "gluon_sm90"), _ANY_SPARSE),
        ),
    ),
)
