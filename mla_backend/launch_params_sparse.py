"""The launch parameters of sparse MLA; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from backend_core.tables.schema import NoParams, Operator
from mla_backend.spec_sparse_mla import SparseMlaSpec


@dataclass(frozen=True)
class TritonSparseMlaParams:
    """Sparse MLA in Triton.

    Attributes:
        block_kv: rows per step of the main loop: 16, 32 or 64.
        block_rows: most heads of a program: 16, 32 or 64.
        num_warps, num_stages: of the kernel.
        decode: how e4m3 becomes the products' operand: ``"plain"`` arithmetic, or packed
            instructions of sm_90 and later that give bf16 (``"bf16"``).
    """

    block_kv: int
    block_rows: int
    num_warps: int
    num_stages: int
    decode: str

    def __post_init__(self) -> None:
        if self.block_kv not in (16, 32, 64):
            raise ValueError(f"block_kv must be 16, 32 or 64, got {self.block_kv}")
        if self.block_rows not in (16, 32, 64):
            raise ValueError(f"block_rows must be 16, 32 or 64, got {self.block_rows}")
        if self.decode not in ("plain", "bf16"):
            raise ValueError(f"decode must be plain or bf16, got {self.decode!r}")


@dataclass(frozen=True)
class GluonSparseMlaParams:
    """Sparse MLA in Gluon for Hopper: some warps fetch, one or two warpgroups compute.

    Attributes:
        max_heads: most heads of a work item: 16, 32 or 64.
        fetch_warps: that fetch and dequantise records: 4 or 8; rows of bf16 are copied by 4.
        fetch_registers: of each of their threads.
    """

    max_heads: int
    fetch_warps: int
    fetch_registers: int

    def __post_init__(self) -> None:
        if self.max_heads not in (16, 32, 64):
            raise ValueError(f"max_heads must be 16, 32 or 64, got {self.max_heads}")
        if self.fetch_warps not in (4, 8):
            raise ValueError(f"fetch_warps must be 4 or 8, got {self.fetch_warps}")


_ANY = "16_heads 32_heads 64_heads 128_heads fp8_ds_mla_cache bf16_rows_cache"
OPERATORS = (
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
        features=dict.fromkeys(("torch", "triton", "gluon_sm90"), _ANY),
    ),
)
