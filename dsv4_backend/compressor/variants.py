"""The kernels' variants: which constants each path and kind of compressor compiles them with.

Triton and the kernels are imported where a variant is built: the torch path needs neither.
"""

from __future__ import annotations

from typing import Any

from backend_core.tables.select import KernelPath
from dsv4_backend.compressor.bound import Variant
from dsv4_backend.spec import CompressorSpec
from dsv4_backend.step_plan import StateLayout


def decode_variant(
    path: KernelPath,
    spec: CompressorSpec,
    state_layout: StateLayout,
    state_block: int,
    pdl_prefetch_safe: bool,
) -> Variant:
    """``decode_split_kernel`` where the path splits channels, ``decode_prefetch_kernel`` where path
    and step plan allow it, else ``decode_step_kernel``.

    Args:
        state_block: rows of a page of the state.
    """
    from dsv4_backend.kernels.decode_prefetch import decode_prefetch_kernel
    from dsv4_backend.kernels.decode_split import decode_split_kernel
    from dsv4_backend.kernels.decode_step import decode_step_kernel

    params = path.params
    constexprs = _state(spec, state_layout, state_block) | _record(spec)
    prefetch = getattr(params, "prefetch", "none") if pdl_prefetch_safe else "none"
    if prefetch != "none":
        pdl = _pdl(path, decode_prefetch_kernel)
        constexprs |= {"POOLS_FIRST": prefetch == "pool" and pdl["PDL"] != "off"} | pdl
        return Variant(decode_prefetch_kernel, constexprs, _options(path))
    constexprs |= {"RATIO": spec.compress_ratio, "BLOCK_W": params.block_w}
    if splits_of(path) > 1:
        constexprs |= {"SPLITS": params.splits, "HAS_WARPS": params.num_warps > 1}
        constexprs |= _pdl(path, decode_split_kernel)
        return Variant(decode_split_kernel, constexprs, _options(path))
    constexprs |= _pdl(path, decode_step_kernel)
    return Variant(decode_step_kernel, constexprs, _options(path))


def splits_of(path: KernelPath) -> int:
    """Programs that share a request of a decode step."""
    return getattr(path.params, "splits", 1)


def prefill_variants(
    path: KernelPath, spec: CompressorSpec, state_layout: StateLayout, state_block: int
) -> tuple[Variant, ...]:
    """The launches of a prefill step, in order."""
    from dsv4_backend.kernels.finish_and_write import finish_and_write_kernel
    from dsv4_backend.kernels.pool_columns import pool_columns_kernel
    from dsv4_backend.kernels.prefill_paged import prefill_paged_kernel
    from dsv4_backend.kernels.prefill_step import prefill_step_kernel
    from dsv4_backend.kernels.state_write import state_write_kernel

    params, options = path.params, _options(path)
    state = _state(spec, state_layout, state_block) | {"RATIO": spec.compress_ratio}
    whole, block_w = state | _record(spec), {"BLOCK_W": params.block_w}
    if path.name == "one_launch":
        constexprs = whole | block_w | {"ROWS": params.rows}
        del constexprs["LAYOUT"]
        return (Variant(prefill_paged_kernel, constexprs, options),)
    rest = options | {"num_warps": params.rest_num_warps}
    if path.name == "column_split":
        pool = state | block_w | {"BLOCK_D": params.block_d}
        return (
            Variant(pool_columns_kernel, pool, options),
            Variant(finish_and_write_kernel, whole, rest),
        )
    return (
        Variant(prefill_step_kernel, whole | block_w, options),
        Variant(state_write_kernel, state, rest),
    )


def in_place_variant(path: KernelPath, head_dim: int, compress_ratio: int, rotate: bool) -> Variant:
    """``norm_rope_rotate_kernel``."""
    from dsv4_backend.kernels.norm_rope_rotate import norm_rope_rotate_kernel

    constexprs: dict[str, Any] = _pdl(path, norm_rope_rotate_kernel)
    constexprs |= {"D": head_dim, "RATIO": compress_ratio, "HAS_ROTATION": rotate}
    return Variant(norm_rope_rotate_kernel, constexprs, _options(path))


def queries_variant(path: KernelPath, spec: CompressorSpec) -> Variant:
    """``indexer_queries_kernel``."""
    from dsv4_backend.kernels.indexer_queries import indexer_queries_kernel

    constexprs = _record(spec) | {"D": spec.head_dim, "HEADS": path.params.heads}
    constexprs["FORMAT"] = spec.record.encoding  # queries lie in no page
    del constexprs["PAGE"]
    return Variant(indexer_queries_kernel, constexprs, _options(path))


def _state(spec: CompressorSpec, state_layout: StateLayout, state_block: int) -> dict[str, Any]:
    return {"D": spec.head_dim, "STATE_BLOCK": state_block, "LAYOUT": state_layout}


def _record(spec: CompressorSpec) -> dict[str, Any]:
    return {
        "PAGE": spec.page_tokens,
        "FORMAT": spec.cache_format,
        "ROUNDING": spec.rounding,
        "IS_FNUZ": spec.fp8 == "fnuz",
        "IS_SPLIT_TABLE": spec.rope_layout == "split",
        "HAS_ROTATION": spec.rotate,
    }


def _options(path: KernelPath) -> dict[str, Any]:
    """Compiler and launch options that a table row asks for."""
    options: dict[str, Any] = {"num_warps": path.params.num_warps, "num_stages": 1}
    if getattr(path.params, "pdl", "off") != "off":
        options["launch_pdl"] = True
    if getattr(path.params, "max_registers", 0):
        options["maxnreg"] = path.params.max_registers
    return options


def _pdl(path: KernelPath, kernel: Any) -> dict[str, Any]:
    """``PDL`` of a kernel (``backend_core.kernels.pdl``); off in Triton's interpreter."""
    from triton.runtime import JITFunction

    return {"PDL": path.params.pdl if isinstance(kernel, JITFunction) else "off"}
