"""Multi-head latent attention (MLA) as a family, for the program, the flags and the tests.

Imports no torch: tables are read and shown where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from backend_core.contracts import whole_number
from backend_core.family import CheckCase, Family, ModelConfig, ModelPaths, TuneSpace
from backend_core.tables.load import serving
from mla_backend.launch_params import TABLES

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target


ENGINE_KERNEL = "fa3"
"""The kernel with which engines decode dense MLA on Hopper: FlashAttention 3."""
SPARSE_MODELS = ("deepseek_v4", "deepseek_v41")
"""The ``model_type`` of models whose attention names rows."""


def model_refusal(config: ModelConfig) -> str | None:
    """Why a model has no MLA layers that are served here, or ``None``."""
    if config.get("model_type") in SPARSE_MODELS:
        return None
    if (config.get("kv_lora_rank"), config.get("qk_rope_head_dim")) != (512, 64):
        return "MLA decode needs kv_lora_rank 512 and qk_rope_head_dim 64"
    if config.get("index_topk"):
        return "MLA decode needs dense attention, and index_topk makes it sparse"
    return None


def describe_model(target: Target, config: ModelConfig, ranks: int, engine: str) -> ModelPaths:
    """The steps that one of ``ranks`` GPUs serves, and their paths.

    Raises:
        ValueError: the configuration has no heads, or they cannot be split over the ranks.
        LookupError: no table for the target, or the engine's own kernel is not behind there.
    """
    heads = _heads(config, ranks)
    if config.get("model_type") in SPARSE_MODELS:
        return _describe_sparse(target, heads)
    from mla_backend.beside import result_file, select_beside, sizes_in_words
    from mla_backend.spec import MlaSpec

    specs = {"decode": MlaSpec(heads, 16)}
    paths = select_beside("mla_decode", target, specs, ENGINE_KERNEL)
    if paths.refused:
        raise LookupError(paths.why)
    selection = paths.served["decode"]
    notes = [
        f"{heads} heads per GPU",
        f"decode steps of {sizes_in_words(selection)} requests, where {result_file(selection)} has"
        f" them ahead of {ENGINE_KERNEL}",
    ]
    return ModelPaths(notes, {"mla_decode": serving(selection.explained)})


def _describe_sparse(target: Target, heads: int) -> ModelPaths:
    """The attention of DeepSeek-V4 and V4.1 in vLLM and sglang."""
    from mla_backend.beside import result_file
    from mla_backend.engines.sparse_layer import FLASHMLA, calls_in_words, sparse_paths

    paths = sparse_paths(target, heads)
    if not paths.served:
        raise LookupError(paths.why)
    notes, rows = [f"{heads} heads per GPU"], {}
    for phase, selection in paths.served.items():
        source = result_file(selection)
        calls = calls_in_words(phase, selection)
        notes.append(f"attention in {calls}, where {source} has them ahead of {FLASHMLA}")
        rows[f"sparse_mla, {phase}"] = serving(selection.explained)
    for phase, why in paths.refused.items():
        notes.append(f"attention in {phase}s: {FLASHMLA}, since {why}")
    return ModelPaths(notes, rows)


def _heads(config: ModelConfig, ranks: int) -> int:
    """Query heads of one of ``ranks`` GPUs."""
    if "num_attention_heads" not in config:
        raise ValueError("the configuration must have num_attention_heads")
    heads = whole_number("num_attention_heads", config["num_attention_heads"])
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be split over {ranks} GPUs")
    return heads // ranks


def check_cases(row: Row) -> Mapping[str, CheckCase]:
    """The calls that a path must get right, by name."""
    from mla_backend.testing import checks, sparse_mla_checks

    if row.operator == "mla_decode":
        return checks.check_cases(row)
    return sparse_mla_checks.check_cases(row)


def tune_space(row: Row) -> TuneSpace:
    """Values that ``tune`` tries of a path's launch parameters."""
    if (row.operator, row.name) != ("mla_decode", "triton"):
        return {}
    return {
        "decode_8k": {
            "block_kv": (16, 32, 64),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3),
        }
    }


def measure(row: Row, target: Target, name: str, grid: int, heads: int) -> Callable[[], object]:
    """An MLA decode step of ``grid`` requests of 8,192 tokens."""
    from mla_backend.testing import checks

    return checks.decode_call(row, target, grid, heads)


FAMILY = Family(
    name="mla",
    title="Multi-head latent attention",
    tables=TABLES,
    layer_kinds=frozenset({"mla", "sparse_mla"}),
    model_refusal=model_refusal,
    describe_model=describe_model,
    check_cases=check_cases,
    interpretable=frozenset({"triton"}),
    tune_space=tune_space,
    measure=measure,
    open_grid={"mla_decode": 4},
    benchmarks={
        "mla-decode": "bench_mla_decode.py",
        "dsv4-attention": "bench_dsv4_attention.py",
    },
    transformers=None,
)
