"""Drafts of speculative decoding in sglang's KDA layers: one launch from the projections on.

sglang verifies a draft of at most ``speculative_num_draft_tokens`` tokens per request without
touching its pools: the state and the convolution's window after token t of a batch's request n go
to step t of row n of two buffers, and once it knows how many tokens it accepts it copies that step
into the pools itself. Drafts that form a tree, and what else `refusal` names, stay upstream's.
`sglang_records` has the form without states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.attention.linear.utils import pp_spec_stable_rows_enabled

from backend_core.engines import seams
from backend_core.strict import fallback
from backend_core.target import Target
from kda_backend.contract.values import DraftInputs, GateSpec, NormInputs, Records, StateRef
from kda_backend.engines import sglang_records
from kda_backend.engines.sglang_kernel import (
    KdaKernel,
    conv_of,
    norm_handed_over,
    split_rows,
    step_tokens,
)
from kda_backend.engines.sglang_seams import SGLANG_DRAFTS
from kda_backend.operators import kda_verify_step
from kda_backend.selection import KdaSelection


def install(kernel: KdaKernel, backend: Any, layer: Any, cache: Any, *, one_launch: bool) -> bool:
    """Verify drafts of ``backend``, sglang's KDAAttnBackend, here; whether it does so.

    Args:
        layer, cache: one of the model's KDA layers, and its states.
        one_launch: the convolution of such layers fits into the launch.
    """
    if getattr(cache, "intermediate_conv_window", None) is None:
        return False  # there is no speculative decoding
    target = kernel.selection.target
    reason = seams.refusal(SGLANG_DRAFTS)
    if sglang_records.records_of(backend) is None:
        reason = reason or refusal(backend, cache, target, one_launch=one_launch)
    if reason is not None:
        fallback(f"drafts are verified by sglang's kernels: {reason}")
        return False
    upstream = backend._forward_target_verify
    backend._forward_target_verify = functools.partial(verify_layer, kernel, backend, upstream)
    return True


def refusal(backend: Any, cache: Any, target: Target, *, one_launch: bool) -> str | None:
    """Why the drafts of a server stay upstream's, or ``None``."""
    dispatcher = backend.kernel_dispatcher
    if backend.topk > 1:
        return f"they form a tree (--speculative-eagle-topk {backend.topk}), not a chain"
    # sglang's default for Kimi's models is nv_cutedsl, which is a kernel of its own on Blackwell
    # and Triton's elsewhere
    chosen = dispatcher.verify_backend
    cutedsl = chosen.is_nv_cutedsl() and target.arch.startswith("sm10")
    if type(dispatcher.verify_kernel) is not TritonKDAKernel or cutedsl:
        return f"{chosen.value} was chosen: pass --linear-attn-verify-backend triton"
    if getattr(backend, "_fused_chain_verify_fn", None) is not None:
        return "SGLANG_OPT_FUSED_KDA_VERIFY asks for a kernel of sglang's own"
    if cache.intermediate_ssm is None:
        return "--enable-linear-replayssm-spec keeps records of sglang's own, not states"
    if pp_spec_stable_rows_enabled():
        return "SGLANG_ENABLE_PP_SPEC gives each request a row of the buffers, not each batch's"
    if not one_launch:
        return "the convolution has another width, or there are fewer key than value heads"
    return None


def verify_layer(
    kernel: KdaKernel,
    backend: Any,
    upstream: Callable[..., Any],
    layer: Any,
    forward_batch: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor:
    """KDAAttnBackend._forward_target_verify: its arguments and its result.

    ``mixed_qkv [T, C]`` before the convolution, raw gate ``a`` and step-size logits ``b`` of T
    drafted tokens, those of a request after one another; T may be padded. Returns ``[1, T, HV,
    V]``, zeros where a token belongs to no request. Kimi-K3's layers also offer their output's
    norm, which then ends the same launch.
    """
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    metadata, records = backend.forward_metadata, sglang_records.records_of(backend)
    norm = norm_handed_over(layer, mixed_qkv.shape[0])
    try:
        if metadata.retrieve_next_token is not None:
            raise ValueError("the drafts of this batch form a tree")
        out = verify(
            kernel.selection,
            layer,
            cache,
            (mixed_qkv, a, b),
            metadata.mamba_cache_indices,
            backend.verify_intermediate_state_indices,
            metadata.query_start_loc,
            norm,
            None if records is None else records.of_layer(layer.layer_id),
        )
    except ValueError as error:
        if records is not None:  # sglang's kernels have nothing to keep these drafts in
            raise RuntimeError(f"drafts cannot be kept as records: {error}") from error
        fallback(f"drafts: {error}")
        result: torch.Tensor = upstream(layer, forward_batch, mixed_qkv, a, b)
        return result
    if norm is not None:
        layer._k3_onorm_consumed = True
    return out.unsqueeze(0)


def verify(
    selection: KdaSelection,
    layer: Any,
    cache: Any,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    norm: NormInputs | None = None,
    records: Records | None = None,
) -> torch.Tensor:
    """The drafts of N requests through one layer.

    Args:
        inputs: ``mixed_qkv``, ``a`` and ``b`` of `verify_layer`.
        slots: ``[N]`` int32 or longer, -1 or 0 for a padded request; rows: of the buffers, ``[N]``
            int32 or longer; query_start_loc: ``[N + 1]`` int32.
        records: of the layer, in the place of its buffer of states.

    Returns:
        ``[T, HV, V]``.

    Raises:
        ValueError: the operator refuses; nothing has been written.
    """
    mixed_qkv, a, b = inputs
    requests = query_start_loc.shape[0] - 1
    rows, windows = rows[:requests], cache.intermediate_conv_window[0].transpose(-1, -2)
    if records is None:
        draft = DraftInputs.in_buffers(cache.intermediate_ssm, rows, windows, query_start_loc)
    else:
        draft = DraftInputs.in_records(records, rows, None, windows, query_start_loc)
    rows_of = split_rows(mixed_qkv, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    return kda_verify_step(
        step_tokens(*rows_of, a, b),
        GateSpec.of(layer.A_log, layer.dt_bias, layer.lower_bound),
        StateRef.pool(cache.temporal, slots[:requests], null_slot=0),
        draft,
        conv=conv_of(layer, cache),
        norm=norm,
        selection=selection,
    )
