"""Block-sparse attention as a family: what the program and the tests ask of it.

Imports no torch: tables are read and shown where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from backend_core.family import CheckCase, Family, ModelConfig, ModelPaths, TuneSpace
from block_sparse_backend.launch_params import TABLES

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target


def model_refusal(config: ModelConfig) -> str:
    """Why no layer of a language model is served."""
    return "block-sparse attention serves video models, which ask for it by name"


def describe_model(target: Target, config: ModelConfig, ranks: int, engine: str) -> ModelPaths:
    """Raises LookupError: no layer of a language model is served."""
    raise LookupError(model_refusal(config))


def check_cases(row: Row) -> Mapping[str, CheckCase]:
    """The calls that a path must get right, by name."""
    from block_sparse_backend.testing import checks

    return checks.check_cases(row)


def tune_space(row: Row) -> TuneSpace:
    """Nothing: ``tune`` tries none of a path's launch parameters."""
    return {}


def measure(row: Row, target: Target, name: str, grid: int, heads: int) -> Callable[[], object]:
    """Raises ValueError: ``tune`` tries nothing here."""
    raise ValueError(f"tune measures nothing of {row.operator}, got {name!r}")


FAMILY = Family(
    name="block_sparse",
    title="Block-sparse attention",
    tables=TABLES,
    layer_kinds=frozenset(),
    model_refusal=model_refusal,
    describe_model=describe_model,
    check_cases=check_cases,
    interpretable=frozenset({"triton"}),
    tune_space=tune_space,
    measure=measure,
    open_grid={},
    benchmarks={"sparse-attention": "bench_sparse_attention.py"},
    transformers=None,
)
