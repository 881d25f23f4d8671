"""DeepSeek-V4's KV compressor as a family: what the program, the engines' flags and the tests ask.

Imports no torch: tables are read and shown where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from backend_core.family import CheckCase, Family, ModelConfig, ModelPaths, TuneSpace
from backend_core.tables.load import PathTable, Verdict, explain, load_table, serving
from backend_core.tables.schema import UPSTREAM
from dsv4_backend.launch_params import TABLES

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target

_C4 = {"num_warps": (1, 2, 4, 8), "block_w": (4, 8)}
_C4_PREFILL = _C4 | {"rest_num_warps": (1, 2, 4)}
_TUNE: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "indexer_decode": _C4,
    "main_c4_decode": _C4,
    "main_c128_decode": {
        "splits": (1, 2, 4, 8),
        "num_warps": (1, 2, 4, 8, 16),
        "block_w": (8, 16, 32, 64),
    },
    "indexer_prefill": _C4_PREFILL,
    "main_c4_prefill": _C4_PREFILL,
    "main_c128_prefill": {
        "num_warps": (2, 4, 8),
        "block_w": (16, 32, 64),
        "block_d": (32, 64, 128),
        "rest_num_warps": (1, 2, 4),
    },
    "v41": {
        "num_warps": (4, 8, 16),
        "block_m": (16, 32, 64),
        "block_k": (64, 128),
        "keys_num_warps": (4, 8),
    },
}


def model_refusal(config: ModelConfig) -> str | None:
    """Why a model has no compressor of DeepSeek-V4's, or ``None``."""
    if config.get("model_type") in ("deepseek_v4", "deepseek_v41"):
        return None
    return "DeepSeek-V4's compressor needs the model_type deepseek_v4 or deepseek_v41"


def describe_model(target: Target, config: ModelConfig, ranks: int, engine: str) -> ModelPaths:
    """The paths of each operator in ``"vllm"`` or ``"sglang"``.

    Every rank has all of a layer's compressor.

    Raises:
        LookupError: no table for the target.
    """
    table = load_table(TABLES, target)
    is_v41 = config.get("model_type") == "deepseek_v41"
    operators = (
        operator
        for operator in TABLES.operator_names
        if is_v41 == (operator == "v41") and not operator.startswith("in_place")
    )
    return ModelPaths([], {operator: _rows(table, operator, engine) for operator in operators})


_STATES = {"vllm": "paged", "sglang": "ring"}
"""The layout of a compressor's states in each engine."""


def _rows(table: PathTable, operator: str, engine: str) -> list[Verdict]:
    """The rows that serve an engine; sglang has a kernel of its own to which rows leave calls."""
    declared = [row for row in table.rows if row.operator == operator]
    kernels = [row.params.kernel for row in declared if row.name == UPSTREAM]
    upstream = kernels[0] if kernels and engine == "sglang" else None
    needs = [_STATES[engine]] if any(row.features for row in declared) else []
    return serving(explain(table, operator, frozenset(needs), upstream=upstream))


def check_cases(row: Row) -> Mapping[str, CheckCase]:
    """The calls that a path of any operator must get right, by name.

    None for the torch path, which is what the kernels are compared with.
    """
    from dsv4_backend.testing import check_cases as cases

    return cases.check_cases(row)


def tune_space(row: Row) -> TuneSpace:
    """The values that ``tune`` tries of a path's launch parameters: of those that the path has.

    A prefill path for rings alone is left out: it runs the same kernels as the path for pages.
    """
    if row.operator.endswith("_prefill") and "paged" not in row.features:
        return {}
    found = {
        name: values
        for name, values in _TUNE.get(row.operator, {}).items()
        if name in row.params_dict()
    }
    return {row.operator: found} if found else {}


def measure(row: Row, target: Target, name: str, grid: int, heads: int) -> Callable[[], object]:
    """``grid`` requests that decode, each at the end of a window, or windows of one prompt."""
    from dsv4_backend.testing import steps

    return steps.measure(row, target, grid)


FAMILY = Family(
    name="dsv4",
    title="DeepSeek-V4's KV compressor",
    tables=TABLES,
    layer_kinds=frozenset({"compressor"}),
    model_refusal=model_refusal,
    describe_model=describe_model,
    check_cases=check_cases,
    interpretable=frozenset({"in_registers", "one_launch", "two_launch", "column_split"}),
    tune_space=tune_space,
    measure=measure,
    open_grid={operator: 64 if operator.endswith("_decode") else 256 for operator in _TUNE}
    | {"v41": 4096},
    benchmarks={"dsv4-compressor": "bench_dsv4_compressor.py"},
    transformers="dsv4_backend.engines.transformers",
)
