"""The compressors of a model in sglang, main and indexer, with their step as one call.

sglang's own code writes state rows and pools in one launch, norms, applies RoPE, rotates the
indexer's rows by Hadamard, quantises and stores in a second. Here a decode step is one launch and a
step with longer chunks two (docs/families/dsv4.md); projections, plans, states and pages are
sglang's. The indexer's queries are rotated by sglang, and its keys here, as upstream does. Steps
that the path table leaves to sglang's kernels, whose state and records are the same, stay sglang's.

On AMD the records lie as aiter's kernels read them: the indexer's fp8 in tiles of 16 x 16, its
MXFP4 with scales in a tensor of their own, and main records of SGLANG_DSV4_UNIFIED_KV_FP8 in two
pools. Angles and the norm's weights stay fp32 there, where upstream's MXFP4 takes bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.utils import aiter_can_use_preshuffle_paged_mqa
from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin

from backend_core.engines.log import chosen
from backend_core.engines.sglang_flag import say
from backend_core.operator import Selection
from backend_core.strict import fallback
from backend_core.tables.schema import UPSTREAM
from backend_core.target import detect_target
from dsv4_backend import (
    CompressorCall,
    CompressorLayer,
    CompressorSpec,
    RingDecode,
    RingPrefill,
    compress_decode_,
    compress_prefill_,
    warm_up,
)
from dsv4_backend.selection import decode_selection, in_words, prefill_selection
from dsv4_backend.spec import CacheFormat, StepSpec

_STEP = "_forward_compress_all_in_one"
_KERNEL = "sglang_jit"
"""sglang's own kernels on CUDA, as the path tables' rows name them."""


def install(backend: Any) -> None:
    """Exchange the step of ``backend``, sglang's attention backend of a DeepSeek-V4."""
    reason = _refusal(backend)
    if reason is None:
        setattr(backend, _STEP, FusedStep(backend, getattr(backend, _STEP)))
    else:
        fallback(f"--attention-backend dsv4: {reason}")


def _refusal(backend: Any) -> str | None:
    kind = type(backend)
    step = getattr(kind, _STEP)
    if step is not getattr(CompressorBackendMixin, _STEP):
        return f"{kind.__name__} has a step of its own, which is not replaced"
    return None


_Paths = Selection[StepSpec, Any]


@dataclass(frozen=True)
class _BoundCompressor:
    """A compressor as the operators take it.

    Attributes:
        norm: sglang's module, which identifies the compressor.
        layer: ``None`` where the compressor stays on upstream's code.
        decode, prefill: the table's paths beside sglang's kernels.
        second: the second tensor of its records, where their format has one.
        memory: the addresses of its records; a pool that moves is bound anew.
    """

    norm: Any
    layer: CompressorLayer | None
    state: torch.Tensor
    pages: torch.Tensor
    second: torch.Tensor | None
    memory: tuple[int, ...]
    decode: _Paths | None = None
    prefill: _Paths | None = None

    def leaves(self, theirs: Any) -> bool:
        """Whether the step of sglang's plan is left to its own kernels."""
        paths, entries = (
            (self.decode, theirs.plan_d) if theirs.is_decode else (self.prefill, theirs.plan_c)
        )
        return paths is None or paths.row(entries.shape[0]).name == UPSTREAM


class FusedStep:
    """In the place of ``_forward_compress_all_in_one`` of one attention backend."""

    def __init__(self, backend: Any, upstream: Callable[..., None]) -> None:
        self._backend = backend
        self._upstream = upstream
        self._bound: dict[int, _BoundCompressor] = {}
        # by ratio, and main or indexer: sglang's plan and slots, and what was made of them
        self._plans: dict[tuple[int, bool], tuple[Any, Any, RingDecode | RingPrefill]] = {}

    def __call__(self, **call: Any) -> None:
        """The state rows of a step's tokens and the records of the windows that end with them.

        Args:
            call: sglang's arguments, among them ``kv_score_input [T, 2·C·d]``,
                ``kv_score_buffer`` with rows of that width, ``kv_cache`` uint8 pages and
                ``out_loc [T]``, a slot for each token; on AMD also ``kv_scale_cache`` or
                ``kv_cache_rope``.
        """
        bound = self._bound.get(id(call["norm"]))
        if bound is None or bound.memory != _memory(call):
            bound = self._bound[id(call["norm"])] = self._bind(call)
        theirs = self._backend._get_paged_compress_metadata(call["compress_ratio"])
        if bound.layer is None or bound.leaves(theirs):
            self._upstream(**call)
            return
        plan = self._plan(theirs, call["compress_ratio"], call["is_indexer"], call["out_loc"])
        tensors = (call["kv_score_input"], bound.state, bound.pages)
        if isinstance(plan, RingDecode):
            compress_decode_(bound.layer, *tensors, plan, second_cache=bound.second)
        else:
            compress_prefill_(bound.layer, *tensors, plan, second_cache=bound.second)

    def _plan(
        self, theirs: Any, compress_ratio: int, is_indexer: bool, out_loc: torch.Tensor
    ) -> RingDecode | RingPrefill:
        """sglang's plan of the step, taken over once for the layers that share it."""
        key = (compress_ratio, is_indexer)
        kept = self._plans.get(key)
        if kept is not None and kept[0] is theirs and kept[1] is out_loc:
            return kept[2]
        plan: RingDecode | RingPrefill
        if theirs.is_decode:
            slots = out_loc[: theirs.plan_d.shape[0]]
            safe = self._is_written(compress_ratio, out_loc)
            plan = RingDecode(theirs.plan_d, slots, pdl_prefetch_safe=safe)
        else:
            plan = RingPrefill(theirs.plan_c, theirs.plan_w, out_loc)
        self._plans[key] = (theirs, out_loc, plan)
        return plan

    def _is_written(self, compress_ratio: int, out_loc: torch.Tensor) -> bool:
        """Whether slots were written before the forward pass, whose projections lie between. The
        pool of HiSparse translates them in each layer, just before this step."""
        return out_loc is self._backend._get_out_loc(compress_ratio)

    def _bind(self, call: dict[str, Any]) -> _BoundCompressor:
        """At a compressor's first step, which is sglang's own warm-up: check its tensors, and
        compile every kernel that a later step may launch."""
        norm, kv_cache, state = call["norm"], call["kv_cache"], call["kv_score_buffer"]
        memory = _memory(call)
        unserved = _BoundCompressor(norm, None, state, kv_cache, None, memory)
        reason = _unserved(call)
        if reason is None:
            try:
                spec = _spec(call)
                decode, prefill = _choose(kv_cache.device, spec)
                layer = _layer(spec, call)
                pages, second = pages_of(kv_cache), _second(call)
                second = None if second is None else pages_of(second)
                state = state.view(-1, spec.compress_ratio, spec.row_width)
                ratio, out_loc = call["compress_ratio"], call["out_loc"]
                theirs = self._backend._get_paged_compress_metadata(ratio)
                plan = self._plan(theirs, ratio, call["is_indexer"], out_loc)
                step = CompressorCall(layer, call["kv_score_input"], state, pages, second)
                of_decode, of_prefill = _decode_and_prefill(plan, self._is_written(ratio, out_loc))
                others: tuple[tuple[RingDecode | RingPrefill, _Paths], ...]
                others = (of_decode, decode), (of_prefill, prefill)
                for other, paths in others:
                    if paths.sizes:
                        warm_up(step, other)
                return _BoundCompressor(norm, layer, state, pages, second, memory, decode, prefill)
            except (LookupError, ValueError) as error:
                reason = str(error)
        fallback(f"--attention-backend dsv4: {reason}")
        return unserved


def _unserved(call: dict[str, Any]) -> str | None:
    """Why a compressor of this kind stays on upstream's code."""
    halves = 2 if call["compress_ratio"] == 4 else 1
    width = 2 * halves * call["head_dim"]
    if call["kv_score_buffer"].shape[-1] != width:
        return (
            f"states must have rows of {width}, got {call['kv_score_buffer'].shape[-1]}:"
            " SGLANG_OPT_USE_ONLINE_COMPRESS keeps running sums instead"
        )
    layout = call.get("kv_layout")
    if layout is not None and layout.name != "V4":
        return f"records must have DeepSeek-V4's layout, got {layout.name}"
    is_single_fp4 = call.get("use_fp4_indexer") and call.get("kv_scale_cache") is None
    if is_single_fp4 and aiter_can_use_preshuffle_paged_mqa():
        return "on AMD MXFP4 records of the indexer must have scales in a tensor of their own"
    return None


def _second(call: dict[str, Any]) -> torch.Tensor | None:
    """The scales of the indexer's MXFP4 on AMD, or the RoPE channels of the unified fp8 pool."""
    name = "kv_cache_rope" if call.get("fp8_2buff") else "kv_scale_cache"
    second: torch.Tensor | None = call.get(name)
    return second


def pages_of(memory: torch.Tensor) -> torch.Tensor:
    """[pages, page bytes] uint8, no copy.

    Raises:
        ValueError: a page's bytes do not follow one another.
    """
    pages = memory.view(torch.uint8)
    try:
        return pages.view(pages.shape[0], -1)
    except RuntimeError as error:
        strides = list(memory.stride())
        raise ValueError(f"the bytes of a page must be adjacent, got strides {strides}") from error


def _memory(call: dict[str, Any]) -> tuple[int, ...]:
    second = _second(call)
    first: int = call["kv_cache"].data_ptr()
    return (first,) if second is None else (first, second.data_ptr())


def _format(call: dict[str, Any]) -> CacheFormat:
    if call["is_indexer"]:
        if call.get("use_fp4_indexer"):
            return "indexer_mxfp4" if _second(call) is None else "indexer_mxfp4_planes"
        return "indexer_fp8_tiles" if _reads_tiles() else "indexer_fp8"
    if call.get("fp8_2buff"):
        return "fp8_two_pools"
    return "bf16_rows" if call.get("bf16_store") else "fp8_ds_mla"


def _reads_tiles() -> bool:
    """Whether sglang reads the indexer's fp8 keys in tiles: with aiter's kernel alone. Its writer
    does not ask which kernel reads; TileLang's, which goes before aiter's, takes flat pages."""
    is_aiters = envs.SGLANG_OPT_USE_AITER_INDEXER.get()
    is_aiters = is_aiters and not envs.SGLANG_OPT_USE_TILELANG_INDEXER.get()
    return bool(is_aiters and aiter_can_use_preshuffle_paged_mqa())


def _spec(call: dict[str, Any]) -> CompressorSpec:
    cache_format = _format(call)
    target = detect_target(call["kv_cache"].device)
    return CompressorSpec(
        head_dim=call["head_dim"],
        compress_ratio=call["compress_ratio"],
        cache_format=cache_format,
        page_tokens=call["page_size"],
        rounding="aiter" if cache_format == "indexer_mxfp4_planes" else "sglang",
        rotate=call["rotate"],
        fp8="fnuz" if target.arch == "gfx942" else "ocp",  # sglang stores each GPU's own
        rope_layout="interleaved",
        eps=call["norm"].variance_epsilon,
    )


def _layer(spec: CompressorSpec, call: dict[str, Any]) -> CompressorLayer:
    # sglang lays [ratio, C·d] out as [C, ratio, d] when it loads the weights
    ape = call["ape"].detach().view(spec.halves, spec.compress_ratio, spec.head_dim)
    weight = call["norm"].weight.detach()
    return CompressorLayer(spec, ape.transpose(0, 1), weight, call["freqs_cis_cache"])


def _decode_and_prefill(
    plan: RingDecode | RingPrefill, safe: bool
) -> tuple[RingDecode, RingPrefill]:
    """A step plan, and one of the other kind in tensors of the same dtypes, for compiling alone.

    A prompt shorter than the ratio ends no window, and its plan has no entry for one; a micro-batch
    may even have no tokens."""
    if isinstance(plan, RingDecode):
        return plan, RingPrefill(plan.entries, plan.entries.view(-1, 2), plan.slots)
    slots = plan.slots[:1]
    entries = plan.windows.new_full((slots.shape[0], 4), -1)
    return RingDecode(entries, slots, pdl_prefetch_safe=safe), plan


@functools.cache
def _choose(device: torch.device, spec: CompressorSpec) -> tuple[_Paths, _Paths]:
    """Select the paths of a kind of compressor, decode and prefill, and log once which they are.

    Raises:
        LookupError: the GPU has none.
    """
    target = detect_target(device)
    selections = (
        decode_selection(target, spec, _KERNEL),
        prefill_selection(target, spec, "ring", _KERNEL),
    )
    layers, paths = in_words(spec, selections)
    say(*chosen(layers, target, "; ".join(paths), (), selections))
    return selections
