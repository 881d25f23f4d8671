"""Kimi Delta Attention as a family: what the program, the engines' flags and the tests ask of it.

Imports no torch: tables are read and shown where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from backend_core.contracts import whole_number
from backend_core.family import CheckCase, Family, ModelConfig, ModelPaths, TuneSpace
from backend_core.tables.load import serving
from kda_backend.launch_params import TABLES
from kda_backend.spec import CONV_TAPS

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target

_TUNE: Mapping[tuple[str, str], TuneSpace] = {
    ("prefill", "two_stage"): {
        "prefill": {
            "block_v": (16, 32),
            "block_v_max": (32, 64),
            "scan_num_warps": (2, 4, 8),
            "scan_num_stages": (2, 3, 4),
        }
    },
    ("recurrent", "recurrent"): {
        "recurrent": {"block_v": (8, 16, 32, 64), "num_warps": (1, 2, 4)},
    },
    ("decode_step", "fused_sm90"): {
        "whole_step": {
            "split": (1, 2, 4, 8),
            "warps": (4, 8, 16),
            "load_hint": ("", "evict_first", "evict_last"),
            "store_hint": ("", "evict_first", "evict_last"),
        },
    },
    ("decode_step", "fused"): {
        "whole_step": {"num_warps": (2, 4, 8), "k_inner": (16, 32, 64)},
        "bare_step": {"block_v": (16, 32, 64, 128), "split_num_warps": (1, 2, 4)},
    },
    ("verify_records", "fused_sm90"): {
        "records": {"split": (1, 2, 4)},
        "commit": {"fold_block_v": (16, 32, 64), "fold_num_warps": (1, 2, 4)},
    },
    ("verify_records", "fused"): {
        "records": {"num_warps": (2, 4, 8), "k_inner": (32, 64, 128)},
        "commit": {"fold_block_v": (16, 32, 64), "fold_num_warps": (1, 2, 4)},
    },
}


def model_refusal(config: ModelConfig) -> str | None:
    """Why a model has no KDA layers, or ``None``."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and linear.get("kda_layers"):
        return None
    if _is_glm(config) or _is_ling(config):
        return None
    return (
        "Kimi Delta Attention needs a linear_attn_config that names kda_layers,"
        " or the configuration of GLM-5.3-Flash or Ling-V3"
    )


def describe_model(target: Target, config: ModelConfig, ranks: int, engine: str) -> ModelPaths:
    """The paths for one of ``ranks`` GPUs that serve the model together.

    Raises:
        ValueError: the configuration has no heads, or they cannot be split over the ranks.
        LookupError: no table for the target, no row that can serve the model, or vLLM's layer has
            another convolution.
    """
    from kda_backend.selection import KdaShape, select

    heads, dim, bounded = _heads(config)
    linear = config.get("linear_attn_config") or config
    taps = linear.get("short_conv_kernel_size", CONV_TAPS)
    if engine == "vllm" and taps != CONV_TAPS:
        raise LookupError(f"the short convolution must have {CONV_TAPS} taps, got {taps}")
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be split over {ranks} GPUs")
    chosen = select(target, KdaShape(heads // ranks, heads // ranks, dim, dim, bounded))
    rows = {each.operator.name: serving(each.explained) for each in chosen.operators}
    return ModelPaths([f"{heads // ranks} heads per GPU"], rows)


def _is_glm(config: ModelConfig) -> bool:
    return config.get("model_type") in ("glm5_next", "glm5_next_text")


def _is_ling(config: ModelConfig) -> bool:
    """Ling-V2.5's configuration has the same name; its linear attention has no convolution."""
    named = config.get("model_type") in ("bailing_hybrid", "bailing_moe_v3_vl")
    return named and config.get("short_conv_kernel_size") is not None


def _heads(config: ModelConfig) -> tuple[int, int, bool]:
    """Heads of a KDA layer, their channels, and whether its gate is bounded.

    Raises:
        ValueError: the configuration does not say.
    """
    linear, where = config.get("linear_attn_config"), "linear_attn_config"
    names = ("num_heads", "head_dim")
    if isinstance(linear, dict):
        bound = linear.get("gate_lower_bound", config.get("gate_lower_bound"))
    else:
        linear, where = config, "config.json"
        names = ("linear_num_heads", "linear_head_dim")
        bound = config.get("linear_lower_bound")
        if _is_ling(config):
            bound = config.get("kda_lower_bound") if config.get("kda_safe_gate") else None
            if names[0] not in config:  # transformers writes both kinds of names
                names = ("num_attention_heads", "head_dim")
    try:
        heads, dim = (whole_number(name, linear.get(name)) for name in names)
    except ValueError as error:
        raise ValueError(f"{where} must have {' and '.join(names)}: {error}") from error
    if heads < 1 or dim < 1:
        raise ValueError(f"{' and '.join(names)} must be positive, got {heads} and {dim}")
    return heads, dim, bound is not None


def check_cases(row: Row) -> Mapping[str, CheckCase]:
    """The calls that a path of any operator must get right, by name."""
    from kda_backend.testing import checks

    return checks.check_cases(row)


def tune_space(row: Row) -> TuneSpace:
    """The values of a path's launch parameters that ``tune`` tries.

    What the Hopper prefill chooses its schedule by is fitted to a sweep
    (``benchmarks/sweep_kda_prefill.py``), not searched.
    """
    return _TUNE.get((row.operator, row.name), {})


def measure(row: Row, target: Target, name: str, grid: int, heads: int) -> Callable[[], object]:
    """A call of ``grid / heads`` sequences, or of one sequence of so many chunks of 64 tokens."""
    from kda_backend.testing.measures import MEASURES

    return MEASURES[name](row, target, grid, heads)


FAMILY = Family(
    name="kda",
    title="Kimi Delta Attention",
    tables=TABLES,
    layer_kinds=frozenset({"linear_attention"}),
    model_refusal=model_refusal,
    describe_model=describe_model,
    check_cases=check_cases,
    interpretable=frozenset({"two_stage", "recurrent", "fused"}),
    tune_space=tune_space,
    measure=measure,
    open_grid={"prefill": 4096, "recurrent": 2048, "decode_step": 2048, "verify_records": 2048},
    benchmarks={
        "kda-prefill": "bench_kda_prefill.py",
        "kda-decode": "bench_kda_decode.py",
        "kda-verify": "bench_kda_verify.py",
    },
    transformers="kda_backend.engines.transformers",
)
