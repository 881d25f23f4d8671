"""Kernel paths of the compressor: table rows to launches, chosen once for each kind of compressor.

Triton and the kernels are imported where a launch is built: the reference needs neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backend_core.path_table import KernelPath, PathSelection, load_table, select
from backend_core.target import Target
from dsv4_backend.metadata import CompressorSpec

if TYPE_CHECKING:
    from backend_core.launch import KernelLaunch

Params = Mapping[str, int | bool | str]


class Paths:
    """The kernel paths of one phase, each with its launch; ``None`` is the torch reference."""

    def __init__(
        self,
        target: Target,
        phase: str,
        feature: str,
        build: Callable[[Params], KernelLaunch],
    ) -> None:
        table = load_table("dsv4", target)
        requires = frozenset() if target.vendor == "cpu" else frozenset({feature})
        self.selection: PathSelection = select(table, phase, requires)
        self._launches: dict[int, KernelLaunch | None] = {
            id(path): self._build(path, build) for path in self.selection.paths
        }

    @staticmethod
    def _build(path: KernelPath, build: Callable[[Params], KernelLaunch]) -> KernelLaunch | None:
        return None if path.name == "reference" else build(path.params)

    def launch(self, rows: int) -> KernelLaunch | None:
        """The launch for a call of ``rows`` plan entries."""
        return self._launches[id(self.selection.lookup(rows))]


def _options(params: Params, name: str = "num_warps") -> dict[str, Any]:
    return {"num_warps": params[name], "num_stages": 1}


def feature_of(spec: CompressorSpec) -> str:
    """The feature that a table row must have to serve this kind of compressor."""
    return "indexer" if spec.head_dim == 128 else f"main_c{spec.compress_ratio}"


def _constexprs(spec: CompressorSpec, layout: str, state_block: int) -> dict[str, Any]:
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


@functools.cache
def in_place_paths(
    target: Target, phase: str, head_dim: int, compress_ratio: int, rotate: bool
) -> Paths:
    """The paths of ``compress_norm_rope_hadamard_``."""

    def build(params: Params) -> KernelLaunch:
        from backend_core.launch import KernelLaunch
        from dsv4_backend.kernels.norm_rope_rotate import norm_rope_rotate_kernel

        constexprs = {
            "D": head_dim,
            "RATIO": compress_ratio,
            "IS_DECODE": phase == "decode",
            "HAS_ROTATION": rotate,
        }
        return KernelLaunch(norm_rope_rotate_kernel, constexprs, _options(params))

    return Paths(target, phase, f"in_place_{head_dim}", build)


@functools.cache
def decode_paths(target: Target, spec: CompressorSpec, layout: str, state_block: int) -> Paths:
    """The paths of a decode step of one part."""

    def build(params: Params) -> KernelLaunch:
        from backend_core.launch import KernelLaunch
        from dsv4_backend.kernels.decode_step import decode_step_kernel

        constexprs = _constexprs(spec, layout, state_block) | {"BLOCK_W": params["block_w"]}
        return KernelLaunch(decode_step_kernel, constexprs, _options(params))

    return Paths(target, "decode", feature_of(spec), build)


@functools.cache
def pair_paths(
    target: Target,
    main: CompressorSpec,
    indexer: CompressorSpec,
    layout: str,
    state_blocks: tuple[int, int],
) -> Paths:
    """The paths of a C4 layer's decode step, main and indexer together."""

    def build(params: Params) -> KernelLaunch:
        from backend_core.launch import KernelLaunch
        from dsv4_backend.kernels.decode_pair import decode_pair_kernel

        constexprs = {
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
        return KernelLaunch(decode_pair_kernel, constexprs, _options(params))

    return Paths(target, "decode", "pair", build)


@functools.cache
def prefill_paths(target: Target, spec: CompressorSpec, layout: str, state_block: int) -> Paths:
    """The paths of a prefill step's windows."""

    def build(params: Params) -> KernelLaunch:
        from backend_core.launch import KernelLaunch
        from dsv4_backend.kernels.prefill_step import prefill_step_kernel

        constexprs = _constexprs(spec, layout, state_block) | {"BLOCK_W": params["block_w"]}
        return KernelLaunch(prefill_step_kernel, constexprs, _options(params))

    return Paths(target, "prefill", feature_of(spec), build)


@functools.cache
def write_paths(target: Target, spec: CompressorSpec, layout: str, state_block: int) -> Paths:
    """The paths of a prefill step's state rows."""

    def build(params: Params) -> KernelLaunch:
        from backend_core.launch import KernelLaunch
        from dsv4_backend.kernels.state_write import state_write_kernel

        constexprs = {
            "D": spec.head_dim,
            "RATIO": spec.compress_ratio,
            "STATE_BLOCK": state_block,
            "PLAN": layout,
        }
        return KernelLaunch(state_write_kernel, constexprs, _options(params, "write_num_warps"))

    return Paths(target, "prefill", feature_of(spec), build)
