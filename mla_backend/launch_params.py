"""The launch parameters of each path, and what the family's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller

from backend_core.tables.schema import NoParams, Operator, TableSchema
from mla_backend.launch_params_sparse import OPERATORS as SPARSE_OPERATORS


@dataclass(frozen=True)
class TritonMlaParams:
    """MLA decode in Triton.

    Attributes:
        block_kv: tokens per step of the main loop: 16, 32 or 64.
        block_rows: most query rows of a program: 16 or 32.
        num_warps, num_stages: of the main kernel.
    """

    block_kv: int
    block_rows: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_kv not in (16, 32, 64):
            raise ValueError(f"block_kv must be 16, 32 or 64, got {self.block_kv}")
        if self.block_rows not in (16, 32):
            raise ValueError(f"block_rows must be 16 or 32, got {self.block_rows}")


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


_ROWS = "8_rows 16_rows 32_rows 1024_rows"
_ANY = f"{_ROWS} any_dtype any_page_size"
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
        *SPARSE_OPERATORS,
    ),
)
