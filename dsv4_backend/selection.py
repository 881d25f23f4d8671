"""Kernel paths of the compressor: table rows to launches, chosen once for each kind of compressor.

Triton and the kernels are imported where a launch is built: the reference needs neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backend_core.tables.select import KernelPath, PathSelection, load_table, select
from backend_core.target import Target
from dsv4_backend.arguments import groups_of, pair_groups
from dsv4_backend.launch_params import TABLES
from dsv4_backend.spec import CompressorSpec

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

T = TypeVar("T")


@dataclass(frozen=True)
class PrefillLaunches:
    """The launches of a prefill step, by the name of its path.

    Attributes:
        windows: ``one_launch``: ``prefill_paged_kernel``, which does all; ``two_launch``:
            ``prefill_step_kernel``; ``column_split``: ``pool_columns_kernel``.
        rest: what must come after every window was pooled: ``state_write_kernel``, or, with the
            channels split, ``finish_and_write_kernel``.
        num_splits: programs for each window; ``one_launch``: for each window and as many tokens
            as its ratio.
    """

    windows: KernelLaunch
    rest: KernelLaunch | None
    num_splits: int


@dataclass(frozen=True)
class QueryLaunch:
    """``indexer_queries_kernel``, a program of which takes ``heads`` heads of a token."""

    kernel: KernelLaunch
    heads: int


class Paths(Generic[T]):
    """The kernel paths of one operator, each with what it launches."""

    def __init__(
        self, target: Target, operator: str, features: set[str], build: Callable[[KernelPath], T]
    ) -> None:
        requires = frozenset(features)
        self.selection: PathSelection = select(load_table(TABLES, target), operator, requires)
        self._launches: dict[int, T | None] = {
            id(path): None if path.name == "torch" else build(path) for path in self.selection.paths
        }

    def launches(self) -> list[T]:
        """What any call may launch; empty for the torch reference."""
        return [launch for launch in self._launches.values() if launch is not None]

    def launch(self, rows: int) -> T | None:
        """The launch for a call of ``rows`` plan entries; ``None`` is the torch reference."""
        return self._launches[id(self.selection.lookup(max(rows, 1)))]


def options(path: KernelPath, name: str = "num_warps") -> dict[str, Any]:
    """Compiler and launch options that a table row asks for; ``name`` is its count of warps."""
    options: dict[str, Any] = {"num_warps": getattr(path.params, name), "num_stages": 1}
    if getattr(path.params, "pdl", 0):
        options["launch_pdl"] = True
    return options


def pdl(path: KernelPath, kernel: Any) -> dict[str, int]:
    """``PDL`` of a kernel, see ``numerics.wait_for_previous``; 0 in Triton's interpreter."""
    from triton.runtime import JITFunction

    return {"PDL": path.params.pdl if isinstance(kernel, JITFunction) else 0}


def kind_of(spec: CompressorSpec) -> str:
    """The kind of compressor, by which the tables' operators are named."""
    return "indexer" if spec.head_dim == 128 else f"main_c{spec.compress_ratio}"


def step_constexprs(spec: CompressorSpec, layout: str, state_block: int) -> dict[str, Any]:
    """What ``decode_step_kernel`` and ``prefill_step_kernel`` take, without launch parameters."""
    return {
        "D": spec.head_dim,
        "RATIO": spec.compress_ratio,
        "STATE_BLOCK": state_block,
        "PAGE": spec.page_tokens,
        "PLAN": layout,
        "FORMAT": spec.cache_format,
        "ROUNDING": spec.rounding,
        "IS_FNUZ": spec.fp8 == "fnuz",
        "IS_SPLIT_TABLE": spec.rope_layout == "split",
        "HAS_ROTATION": spec.rotate,
    }


def paged_constexprs(step: dict[str, Any]) -> dict[str, Any]:
    """What ``prefill_paged_kernel`` takes, from the constexprs of a step."""
    return {name: value for name, value in step.items() if name != "PLAN"}


def pair_constexprs(
    main: CompressorSpec, indexer: CompressorSpec, layout: str, state_blocks: tuple[int, int]
) -> dict[str, Any]:
    """What ``decode_pair_kernel`` takes."""
    return {
        "M_STATE_BLOCK": state_blocks[0],
        "X_STATE_BLOCK": state_blocks[1],
        "M_PAGE": main.page_tokens,
        "X_PAGE": indexer.page_tokens,
        "PLAN": layout,
        "M_FORMAT": main.cache_format,
        "X_FORMAT": indexer.cache_format,
        "ROUNDING": main.rounding,
        "IS_FNUZ": main.fp8 == "fnuz",
        "IS_SPLIT_TABLE": main.rope_layout == "split",
        "HAS_ROTATION": indexer.rotate,
    }


def decode_constexprs(path: KernelPath, kernel: Any, is_settled: bool) -> dict[str, Any]:
    """What a row's parameters give ``decode_step_kernel`` or ``decode_pair_kernel``."""
    launch = pdl(path, kernel)
    pools_early = launch["PDL"] > 0 and path.params.pools_early
    return {
        "BLOCK_W": path.params.block_w,
        "READS_EARLY": is_settled and path.params.reads_early,
        "POOLS_EARLY": is_settled and pools_early,
        **launch,
    }


@functools.cache
def in_place_paths(
    target: Target, phase: str, head_dim: int, compress_ratio: int, rotate: bool
) -> Paths[KernelLaunch]:
    """The paths of ``compress_norm_rope_hadamard_``."""

    def build(path: KernelPath) -> KernelLaunch:
        from backend_core.launch.triton import KernelLaunch
        from dsv4_backend.kernels.norm_rope_rotate import norm_rope_rotate_kernel

        constexprs = {
            "D": head_dim,
            "RATIO": compress_ratio,
            "IS_DECODE": phase == "decode",
            "HAS_ROTATION": rotate,
        } | pdl(path, norm_rope_rotate_kernel)
        return KernelLaunch(norm_rope_rotate_kernel, constexprs, options(path))

    return Paths(target, f"in_place_{head_dim}_{phase}", set(), build)


@functools.cache
def query_paths(target: Target, spec: CompressorSpec) -> Paths[QueryLaunch]:
    """The paths of ``quantise_indexer_queries``."""

    def build(path: KernelPath) -> QueryLaunch:
        from backend_core.launch.triton import KernelLaunch
        from dsv4_backend.kernels.indexer_queries import indexer_queries_kernel

        heads = path.params.heads
        constexprs = query_constexprs(spec) | {"HEADS": heads}
        return QueryLaunch(KernelLaunch(indexer_queries_kernel, constexprs, options(path)), heads)

    found = Paths(target, "queries", set(), build)
    kernels = tuple(launch.kernel for launch in found.launches())
    for kernel in kernels:
        kernel.alternatives = kernels
    return found


def query_constexprs(spec: CompressorSpec) -> dict[str, Any]:
    """What ``indexer_queries_kernel`` takes, without launch parameters."""
    return {
        "D": spec.head_dim,
        "FORMAT": spec.cache_format,
        "ROUNDING": spec.rounding,
        "IS_FNUZ": spec.fp8 == "fnuz",
        "IS_SPLIT_TABLE": spec.rope_layout == "split",
        "HAS_ROTATION": spec.rotate,
    }


@functools.cache
def decode_paths(
    target: Target, spec: CompressorSpec, layout: str, state_block: int, is_settled: bool = False
) -> Paths[KernelLaunch]:
    """The paths of a decode step of one part."""

    def build(path: KernelPath) -> KernelLaunch:
        from backend_core.launch.triton import KernelLaunch
        from dsv4_backend.kernels.decode_step import decode_step_kernel

        constexprs = step_constexprs(spec, layout, state_block)
        constexprs |= decode_constexprs(path, decode_step_kernel, is_settled)
        groups = groups_of(decode_step_kernel)
        return KernelLaunch(decode_step_kernel, constexprs, options(path), groups)

    return Paths(target, f"{kind_of(spec)}_decode", set(), build)


@functools.cache
def pair_paths(
    target: Target,
    main: CompressorSpec,
    indexer: CompressorSpec,
    layout: str,
    state_blocks: tuple[int, int],
    is_settled: bool = False,
) -> Paths[KernelLaunch]:
    """The paths of a C4 layer's decode step, main and indexer together."""

    def build(path: KernelPath) -> KernelLaunch:
        from backend_core.launch.triton import KernelLaunch
        from dsv4_backend.kernels.decode_pair import decode_pair_kernel

        constexprs = pair_constexprs(main, indexer, layout, state_blocks)
        constexprs |= decode_constexprs(path, decode_pair_kernel, is_settled)
        groups = pair_groups(decode_pair_kernel)
        return KernelLaunch(decode_pair_kernel, constexprs, options(path), groups)

    return Paths(target, "pair_decode", set(), build)


@functools.cache
def prefill_paths(
    target: Target, spec: CompressorSpec, layout: str, state_block: int
) -> Paths[PrefillLaunches]:
    """The paths of a prefill step."""

    def build(path: KernelPath) -> PrefillLaunches:
        from backend_core.launch.triton import KernelLaunch
        from dsv4_backend.kernels.finish_and_write import finish_and_write_kernel
        from dsv4_backend.kernels.pool_columns import pool_columns_kernel
        from dsv4_backend.kernels.prefill_paged import prefill_paged_kernel
        from dsv4_backend.kernels.prefill_step import prefill_step_kernel
        from dsv4_backend.kernels.state_write import state_write_kernel

        def launch_of(
            kernel: Any, constexprs: dict[str, Any], options: dict[str, Any]
        ) -> KernelLaunch:
            return KernelLaunch(kernel, constexprs, options, groups_of(kernel))

        step = step_constexprs(spec, layout, state_block)
        rows = {name: step[name] for name in ("D", "RATIO", "STATE_BLOCK", "PLAN")}
        block_w = {"BLOCK_W": path.params.block_w}
        if path.name == "one_launch":
            rows_each = path.params.rows
            constexprs = paged_constexprs(step) | block_w | {"ROWS": rows_each}
            launch = launch_of(prefill_paged_kernel, constexprs, options(path))
            return PrefillLaunches(launch, None, spec.compress_ratio // rows_each + 1)
        rest_options = options(path, "rest_num_warps")
        if path.name == "column_split":
            block_d = path.params.block_d
            pool = rows | block_w | {"BLOCK_D": block_d}
            return PrefillLaunches(
                launch_of(pool_columns_kernel, pool, options(path)),
                launch_of(finish_and_write_kernel, step, rest_options),
                spec.head_dim // block_d,
            )
        return PrefillLaunches(
            launch_of(prefill_step_kernel, step | block_w, options(path)),
            launch_of(state_write_kernel, rows, rest_options),
            1,
        )

    return Paths(target, f"{kind_of(spec)}_prefill", {layout}, build)
