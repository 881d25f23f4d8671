"""Operator families, as everything outside them sees them.

A family is a package with a `Family` in its ``family.py`` and one line in `PACKAGES`. Importing a
family needs no torch: tables are read and shown where it is not installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

    from backend_core.tables.load import Verdict
    from backend_core.tables.schema import Row, TableSchema
    from backend_core.target import Target

PACKAGES = ("kda_backend", "dsv4_backend", "mla_backend", "block_sparse_backend")
"""The packages of this project that hold a family, in the order in which they are shown."""

ModelConfig: TypeAlias = Mapping[str, Any]
"""A model's ``config.json``, with the keys of its ``text_config`` at the top."""

CheckCase: TypeAlias = "Callable[[Target, torch.device], tuple[float, float]]"
"""Makes one call on the device; returns (error, allowed error). Raising is a failure too."""

TuneSpace: TypeAlias = Mapping[str, Mapping[str, tuple[int | bool | str, ...]]]
"""For each measure, the values that each launch parameter is tried with."""

Measure: TypeAlias = "Callable[[Row, Target, str, int, int], Callable[[], object]]"
"""(path, target, measure, grid, heads) -> a call to be timed, on tensors of the GPU."""


class ModelPaths(NamedTuple):
    """The paths that would serve one rank of a model.

    Attributes:
        notes: sentences, of how the model is split and which calls are served.
        rows: the tables' rows that serve, by operator and what else tells calls apart.
    """

    notes: Sequence[str]
    rows: Mapping[str, Sequence[Verdict]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """One family of operators: what the program, the tests and the engines' flags ask of it.

    Attributes:
        name: as in table files, on the command line and in sglang's flag: ``"kda"``.
        title: for people: ``"Kimi Delta Attention"``.
        tables: the family's operators, and what its path tables may hold.
        layer_kinds: that an engine's flag hands to the family: ``linear_attention``, ``mla``,
            ``sparse_mla``, ``compressor``.
        model_refusal: one sentence that says why no layer of a model is this family's, or ``None``.
        describe_model: (target, config, ranks, engine) -> the paths that would serve a rank of the
            model in ``"vllm"`` or ``"sglang"``.
            Raises LookupError where none can, ValueError where the config cannot be read.
        check_cases: the calls that a path must get right, by name, the quick ones first; none for
            the path that others are compared with.
        interpretable: names of the paths that are written in Triton alone, which Triton's
            interpreter runs on a CPU.
        tune_space: what ``tune`` tries of a path; empty where it has nothing to try.
        measure: the call that ``tune`` times for one of the measures of ``tune_space``.
        open_grid: for each operator that ``tune`` searches, the grid at which a row without
            ``max_grid`` is timed.
        benchmarks: by what ``bench`` calls them, scripts of ``benchmarks/`` that take
            ``--output FILE``.
        transformers: the module of the adapter for Hugging Face transformers, with ``enable()`` and
            ``disable()``, and ``load_model(checkpoint, device)`` or ``tiny_model(device)`` where
            the family has a small model to show; ``None`` where there is no adapter.
    """

    name: str
    title: str
    tables: TableSchema
    layer_kinds: frozenset[str]
    model_refusal: Callable[[ModelConfig], str | None]
    describe_model: Callable[[Target, ModelConfig, int, str], ModelPaths]
    check_cases: Callable[[Row], Mapping[str, CheckCase]]
    interpretable: frozenset[str]
    tune_space: Callable[[Row], TuneSpace]
    measure: Measure
    open_grid: Mapping[str, int]
    benchmarks: Mapping[str, str]
    transformers: str | None = None


@functools.cache
def families() -> Mapping[str, Family]:
    """Every family by name, in the order of `PACKAGES`."""
    found = [importlib.import_module(f"{package}.family").FAMILY for package in PACKAGES]
    return {family.name: family for family in found}
