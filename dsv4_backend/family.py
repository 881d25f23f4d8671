"""DeepSeek-V4's KV compressor as a family: what the program, the engines' flags and the tests ask.

Imports no torch: tables are read and shown where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from backend_core.family import CheckCase, Family, ModelConfig, TuneSpace
from backend_core.tables.select import load_table
from dsv4_backend.launch_params import TABLES

if TYPE_CHECKING:
    from backend_core.tables.schema import KernelPath
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
    "low_ratio": {
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


def describe_model(target: Target, config: ModelConfig, ranks: int) -> list[str]:
    """The paths of each operator; every rank has all of a layer's compressor.

    Raises:
        LookupError: no table for the target.
    """
    names: dict[str, list[str]] = {}
    for row in load_table(TABLES, target).rows:
        of_operator = names.setdefault(row.operator, [])
        if row.name not in of_operator:
            of_operator.append(row.name)
    return [f"{operator}: {', '.join(paths)}" for operator, paths in names.items()]


def check_cases(path: KernelPath) -> Mapping[str, CheckCase]:
    """The calls that a path of any operator must get right, by name.

    None for the torch path, which is what the kernels are compared with.
    """
    from dsv4_backend.testing import check_cases as cases

    return cases.check_cases(path)


def tune_space(path: KernelPath) -> TuneSpace:
    """The values that ``tune`` tries of a path's launch parameters: of those that the path has.

    A prefill path for rings alone is left out: it runs the same kernels as the path for pages.
    """
    if path.operator.endswith("_prefill") and "paged" not in path.features:
        return {}
    found = {
        name: values
        for name, values in _TUNE.get(path.operator, {}).items()
        if name in path.params_dict()
    }
    return {path.operator: found} if found else {}


def measure(
    path: KernelPath, target: Target, name: str, grid: int, heads: int
) -> Callable[[], object]:
    """``grid`` requests that decode, each at the end of a window, or windows of one prompt."""
    from dsv4_backend.testing import steps

    return steps.measure(path, target, grid)


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
    | {"low_ratio": 4096},
    benchmarks={"dsv4-compressor": "bench_dsv4_compressor.py"},
    transformers="dsv4_backend.engines.transformers",
)
