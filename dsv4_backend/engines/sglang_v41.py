"""DeepSeek-V4.1 in sglang: a compressor and the indexer's keys as one call of this package.

sglang's attention backend projects, pools, norms and stores in `_low_ratio_compress`, or, in the
graph of a prefill, projects at a break and hands the rows to `_low_ratio_compress_torch` or
`_low_ratio_compress_fused`. Their place is taken here. Projections, rings, pages and metadata are
sglang's; nothing is computed of a step but in the operator's kernels, so whatever sglang refreshes
in place before it replays a graph is what they read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
from sglang.srt.layers.attention.dsv4.dsv41_sparse import (
    DeepseekV41Compressor,
    DeepseekV41Indexer,
    RMSNorm,
)
from sglang.srt.runtime_context import get_parallel

from backend_core.engines.sglang_flag import say
from backend_core.strict import fallback
from dsv4_backend import (
    RecordSpec,
    V41Call,
    V41Layer,
    V41Spec,
    V41Step,
    compress_v41_,
    warm_up,
)
from dsv4_backend.engines.sglang_compressor import pages_of
from dsv4_backend.engines.v41_paths import say_paths
from dsv4_backend.spec import ROPE_DIM

_EAGER, _TORCH, _FUSED = (f"_low_ratio_compress{end}" for end in ("", "_torch", "_fused"))
_STEPS = (_EAGER, _TORCH, _FUSED)
"""sglang's methods that are exchanged."""
_KEY_BYTES = 68
"""Bytes of an indexer's key in MXFP4 with its scales."""


def install(backend: Any) -> None:
    """Exchange the step of ``backend``, sglang's attention backend of a DeepSeek-V4.1."""
    reason = _refusal(backend)
    if reason is None:
        V41Steps(backend)
    else:
        fallback(f"--attention-backend dsv4: {reason}")


def _refusal(backend: Any) -> str | None:
    kind, pool = type(backend), backend.token_to_kv_pool
    if not isinstance(backend, DeepseekV4AttnBackend) or torch.version.hip is not None:
        return (
            f"{kind.__name__} stores DeepSeek-V4.1's records for kernels of ROCm, which is not"
            " served"
        )
    for name in _STEPS:
        if getattr(kind, name) is not getattr(DeepseekV4AttnBackend, name):
            return f"{kind.__name__} has a {name} of its own, which is not replaced"
    if get_parallel().attn_cp_size > 1:
        return "prefill context parallelism compresses the rows of all ranks, which is not served"
    if pool.uniform_fp8:
        return "main records must have DeepSeek-V4's layout, got e4m3 without scales (trtllm)"
    for ratio in backend.low_ratios:
        layout = pool.compressed_kv_layout(ratio)
        if layout.name != "V4":
            return f"main records must have DeepSeek-V4's layout, got {layout.name}"
    return None


@dataclass
class _BoundLayer:
    """A layer as the operator takes it.

    Attributes:
        layer: ``None`` where it stays on upstream's code.
        memory: the addresses of its records and state; a pool that moves is bound anew.
        tensors: state, pages and the indexer's pages.
    """

    layer: V41Layer | None = None
    memory: tuple[int, ...] = ()
    tensors: tuple[Any, Any, Any] = (None, None, None)


class V41Steps:
    """In the place of sglang's methods that compress, of one attention backend."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._upstream: dict[str, Callable[..., None]] = {}
        self._bound: dict[int, _BoundLayer] = {}
        # by ratio: the addresses and numbers that a plan is made of, and the plan, which keeps them
        self._plans: dict[int, tuple[tuple[Any, ...], V41Step]] = {}
        for name in _STEPS:
            self._upstream[name] = getattr(backend, name)
            ours = self.eager if name == _EAGER else functools.partial(self.in_graph, name)
            setattr(backend, name, ours)

    def eager(self, layer: Any, x: Any, req: Any, pos: Any, forward_batch: Any) -> None:
        """The ring rows of all tokens and both records of the groups that end with them.

        Args:
            layer: sglang's attention layer.
            x: ``[T, hidden]``.
            req, pos: ``[T]`` int64, the ring of each token's request, and its position.
        """
        tokens, mode, backend = pos.shape[0], forward_batch.forward_mode, self._backend
        if not tokens:
            return
        starts = longest = None
        if mode.is_decode():
            longest = 1
        elif mode.is_target_verify() and not backend.is_draft_runner:
            longest = backend.speculative_num_draft_tokens
        elif mode.is_extend_without_speculative():
            lengths = forward_batch.extend_seq_lens_cpu
            # of padded or partial batches sglang's first tokens are not those of these rows
            if lengths is not None and sum(map(int, lengths)) == tokens:
                starts = forward_batch.extend_start_loc
        compressor = layer.compressor

        def project() -> tuple[torch.Tensor, torch.Tensor | None]:
            if compressor.use_fused_gate:
                return compressor.project_fused(x), None
            rows: tuple[torch.Tensor, torch.Tensor | None] = compressor.project(x)
            return rows

        if not self._run(layer, project, req, pos, starts, longest):
            self._upstream[_EAGER](layer, x, req, pos, forward_batch)

    def in_graph(
        self, name: str, layer: Any, x: Any, req: Any, pos: Any, projected: Any = None, **more: Any
    ) -> None:
        """The same in the graph of a prefill, whose rows are projected already."""
        if projected is not None:
            rows = projected if isinstance(projected, tuple) else (projected, None)
            offsets = self._backend.forward_metadata.low_ratio_extend_offsets
            starts = None if offsets is None else offsets[0]  # unused places are 0
            if self._run(layer, lambda: rows, req, pos, starts, None):
                return
        self._upstream[name](layer, x, req, pos, projected=projected, **more)

    def _run(
        self,
        layer: Any,
        project: Callable[[], tuple[torch.Tensor, torch.Tensor | None]],
        req: torch.Tensor,
        pos: torch.Tensor,
        starts: torch.Tensor | None,
        longest: int | None,
    ) -> bool:
        """Whether the step of a layer was made here."""
        pool, at = self._backend.token_to_kv_pool, layer.layer_id
        bound = self._bound.get(at)
        if bound is not None and bound.layer is None:
            return False
        main, index = pool.get_extra_key_buffer(at), pool.get_index_k_with_scale_buffer(at)
        state, ring_rows = None, 1
        if layer.compress_ratio == 2:
            states = pool.get_attention_compress_states(at)
            state, ring_rows = states.kv_score_buffer.kv_score, states.ring_size
        memory = (main.data_ptr(), index.data_ptr(), 0 if state is None else state.data_ptr())
        rows = None
        if bound is None or bound.memory != memory:
            bound = self._bound[at] = _BoundLayer(memory=memory)
            if (reason := _unserved(layer)) is None:
                try:
                    tensors = _rings(state, ring_rows), pages_of(main), pages_of(index)
                    ours = _layer(layer, pool.get_extra_key_page_size(at), index.shape[1])
                    say_paths(say, main.device, ours.spec)
                    rows = project()
                    call = V41Call(ours, rows[0], *tensors, rows[1])
                    for firsts in (None, pos[:1].int() if starts is None else starts):
                        warm_up(call, self._plan(layer.compress_ratio, req, pos, firsts, longest))
                    bound.layer, bound.tensors = ours, tensors
                except (LookupError, ValueError) as error:
                    reason = str(error)
            if reason is not None:
                fallback(f"--attention-backend dsv4: {reason}")
                return False
        assert bound.layer is not None
        kv, score = rows or project()
        plan = self._plan(layer.compress_ratio, req, pos, starts, longest)
        compress_v41_(bound.layer, kv, *bound.tensors, plan, score=score)
        return True

    def _plan(
        self,
        compress_ratio: int,
        req: torch.Tensor,
        pos: torch.Tensor,
        starts: torch.Tensor | None,
        longest: int | None,
    ) -> V41Step:
        """The step's plan, kept for the layers of the same ratio."""
        core = self._backend.forward_metadata.core_metadata
        slots = core.c1_out_loc if compress_ratio == 1 else core.c2_out_loc
        tokens = min(pos.shape[0], slots.shape[0])
        given: list[Any] = [pos[:tokens], slots[:tokens], slots[:tokens]]
        if compress_ratio == 2:
            given += [core.raw_out_loc[:tokens], starts, longest, req[:tokens]]
        key = tuple((x.data_ptr(), x.shape) if isinstance(x, torch.Tensor) else x for x in given)
        kept = self._plans.get(compress_ratio)
        if kept is None or kept[0] != key:
            kept = self._plans[compress_ratio] = (key, V41Step(*given))
        return kept[1]


def _unserved(layer: Any) -> str | None:
    """Why a layer's compressor stays on upstream's code."""
    compressor, indexer = layer.compressor, layer.indexer
    if indexer is None or not indexer.owns_k:
        return f"layer {layer.layer_id} makes latents and no indexer's keys of them"
    kinds = (
        (compressor, DeepseekV41Compressor),
        (indexer, DeepseekV41Indexer),
        *((norm, RMSNorm) for norm in (compressor.norm, indexer.k_norm)),
    )
    for module, kind in kinds:
        if type(module) is not kind:
            return f"{type(module).__module__}.{type(module).__name__} is not replaced"
    if compressor.norm.eps != indexer.k_norm.eps:
        return "the latent's norm and the key's must have one eps"
    turned = layer.rope_head_dim, indexer.rope_head_dim
    if turned != (ROPE_DIM, ROPE_DIM):
        return f"RoPE must turn {ROPE_DIM} channels, got {turned[0]} and {turned[1]}"
    return None


def _rings(state: torch.Tensor | None, ring_rows: int) -> torch.Tensor | None:
    """sglang's flat rows as rings; those of no ring, which it keeps for padding, are left out."""
    if state is None:
        return None
    rings = state.shape[0] // ring_rows
    return state[: rings * ring_rows].view(rings, ring_rows, state.shape[1])


def _layer(layer: Any, page_tokens: int, key_page_bytes: int) -> V41Layer:
    compressor, indexer = layer.compressor, layer.indexer
    records = functools.partial(RecordSpec, rounding="sglang_v41", fp8="ocp")
    spec = V41Spec(
        compress_ratio=layer.compress_ratio,
        main=records(cache_format="fp8_ds_mla", page_tokens=page_tokens),
        index=records(cache_format="indexer_mxfp4", page_tokens=key_page_bytes // _KEY_BYTES),
        rope_layout="interleaved",
        eps=compressor.norm.eps,
    )
    return V41Layer(
        spec,
        compressor.norm.weight.detach(),
        indexer.wk.weight.detach(),
        indexer.k_norm.weight.detach(),
        torch.view_as_real(layer.freqs_cis).flatten(-2),
    )
