"""A KDA layer between its projections: short convolution, delta rule, gated norm.

What the engines' adapters call, on the engines' own memory: packed q, k and v of all heads, and
pools of convolution and recurrent states that are read and written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from backend_core.contracts import expect_stride
from kda_backend import api
from kda_backend.contract.inputs import (
    BETA_SIGMOID,
    GATE_BOUNDED,
    GATE_SOFTPLUS,
    KdaInputs,
    StateInputs,
    check_inputs,
    check_output,
    check_slots,
    check_state_pool,
    wants_grad,
)
from kda_backend.decode_step import kda_decode_step, kda_verify_step
from kda_backend.layer_stages import check_gated_norm, check_short_conv, gated_norm, short_conv
from kda_backend.prefill.two_stage import PIPELINES
from kda_backend.scratch import Workspace
from kda_backend.selection import KdaPlan
from kda_backend.step_plan import ChunkMetadata


@dataclass(frozen=True)
class LayerWeights:
    """What a layer brings beside its projections; the tensors are the engine's own.

    Attributes:
        conv: ``[3 H D, W]`` contiguous, the filters of q, k and v, newest token last.
        a_log: ``H`` elements; dt_bias: ``H * D`` elements; fp32.
        norm: ``[D]``; norm_eps: of the gated norm.
        lower_bound: of the gate, or ``None`` for the unbounded one.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    lower_bound: float | None


class Tokens(NamedTuple):
    """What the projections made of T tokens, all before activation; channels adjacent.

    Attributes:
        qkv: ``[T, 3 H D]``.
        g: ``[T, H, D]`` raw gate; beta: ``[T, H]`` logits; gate: ``[T, H, D]`` logits of the
            output's gate.
        out: ``[T, H, D]``, written.
    """

    qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor
    out: torch.Tensor


class Pools(NamedTuple):
    """An engine's states, read and written in place.

    Attributes:
        conv: ``[slots, 3 H D, W - 1]``, any strides.
        state: ``[slots, H, D, D]`` fp32 or bf16 (``[V, K]``).
    """

    conv: torch.Tensor
    state: torch.Tensor


def prefill(
    weights: LayerWeights,
    plan: KdaPlan,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    metadata: ChunkMetadata,
    workspace: Workspace,
    *,
    checked: bool = False,
) -> None:
    """Sequences of any length: a convolution, the chunked delta rule, the norm.

    Args:
        state_indices: ``[N]`` int32 slot of each sequence in both pools; -1 for none.
        has_initial_state: ``[N]`` bool, or ``None`` where every slot is read.
        metadata: of these T tokens.
        checked: an earlier layer of this step was given such tensors; saves half of the host time.

    Raises:
        ValueError: a tensor is not as described; nothing has been written then.
    """
    if not checked:
        _check_prefill(weights, plan, tokens, pools, state_indices, has_initial_state, metadata)
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    qkv, g, beta, gate, out = tokens
    mixed = short_conv(qkv, weights.conv, pools.conv, state_indices, has_initial_state, metadata)
    q, k, v = mixed.view(1, -1, 3, heads, dim).unbind(2)
    bound = weights.lower_bound
    x = KdaInputs(
        q,
        k,
        v,
        g.unsqueeze(0),
        beta.unsqueeze(0),
        weights.a_log,
        weights.dt_bias,
        GATE_SOFTPLUS if bound is None else GATE_BOUNDED,
        0.0 if bound is None else bound,
        BETA_SIGMOID,
        True,
        dim**-0.5,
    )
    state = StateInputs(pools.state, pools.state, 2, 3, state_indices, has_initial_state)
    path = plan.prefill.lookup(metadata.num_chunks * heads)
    PIPELINES[path.name](path, x, metadata, state, out.unsqueeze(0), None, workspace)
    kernels = metadata.chunk_table is not None
    gated_norm(out, gate, weights.norm, weights.norm_eps, out, kernels=kernels)


def _check_prefill(
    weights: LayerWeights,
    plan: KdaPlan,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    metadata: ChunkMetadata,
) -> None:
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    qkv, g, beta, gate, out = tokens
    check_short_conv(qkv, weights.conv, pools.conv, state_indices, metadata)
    expect_stride("g", g, 2, 1)
    q, k, v = qkv.view(qkv.shape[0], 3, heads, dim).unsqueeze(0).unbind(2)
    beta = beta.unsqueeze(0)
    g = g.unsqueeze(0)
    kinds = check_inputs(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        use_gate=True,
        lower_bound=weights.lower_bound,
        use_beta_sigmoid=True,
        allow_neg_eigval=False,
        l2norm=True,
        wants_grad=wants_grad(q, k, v, g, beta),
    )
    api.check_plan(q, v, g, kinds.gate, plan)
    api.check_metadata(metadata, q, plan)
    check_state_pool(pools.state, state_indices, has_initial_state, q, v, metadata.num_sequences)
    check_slots(state_indices, pools.state)
    check_output(out.unsqueeze(0), v)
    check_gated_norm(out, gate, weights.norm, out)


def decode(
    weights: LayerWeights,
    plan: KdaPlan,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    null_slot: int | None,
) -> None:
    """One token of each sequence, all in one launch; every valid slot is read.

    Called behind the layer's projections: the launch before it must not write the pools or
    ``state_indices``, which may be read while that one still runs.

    Arguments as :func:`prefill`, with ``N = T``; rows at ``null_slot`` are padding too.
    """
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    qkv, g, beta, gate, out = tokens
    q, k, v = qkv.view(qkv.shape[0], 3, heads, dim).unbind(1)
    kda_decode_step(
        q,
        k,
        v,
        g,
        beta,
        pools.state,
        state_indices,
        null_slot=null_slot,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=weights.lower_bound,
        A_log=weights.a_log,
        dt_bias=weights.dt_bias,
        conv_state=pools.conv,
        conv_weight=weights.conv,
        norm_weight=weights.norm,
        norm_gate=gate,
        norm_eps=weights.norm_eps,
        out=out,
        pools_settled=True,
        plan=plan,
    )


def verify(
    weights: LayerWeights,
    plan: KdaPlan,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    null_slot: int | None,
) -> None:
    """The drafted tokens of each sequence in one launch; rows of no sequence are not written.

    Arguments as :func:`prefill`, but ``pools.conv`` has at least ``S + 2`` columns.

    Args:
        state_indices: ``[N, S]`` int32, a slot for each token of a draft.
        num_accepted_tokens: ``[N]`` int32, of the draft before; cu_seqlens: ``[N + 1]``.
    """
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    qkv, g, beta, gate, out = tokens
    q, k, v = qkv.view(qkv.shape[0], 3, heads, dim).unbind(1)
    kda_verify_step(
        q,
        k,
        v,
        g,
        beta,
        pools.state,
        state_indices,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
        null_slot=null_slot,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=weights.lower_bound,
        A_log=weights.a_log,
        dt_bias=weights.dt_bias,
        conv_state=pools.conv,
        conv_weight=weights.conv,
        norm_weight=weights.norm,
        norm_gate=gate,
        norm_eps=weights.norm_eps,
        out=out,
        plan=plan,
    )


def decode_or_start(
    weights: LayerWeights,
    plan: KdaPlan,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    metadata: ChunkMetadata,
) -> None:
    """Sequences of one token, or none for padding, some of which may start with it.

    Arguments as :func:`prefill`; the recurrent kernel between its convolution and its norm.
    """
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    qkv, g, beta, gate, out = tokens
    check_short_conv(qkv, weights.conv, pools.conv, state_indices, metadata)
    check_gated_norm(out, gate, weights.norm, out)
    mixed = short_conv(qkv, weights.conv, pools.conv, state_indices, has_initial_state, metadata)
    q, k, v = mixed.view(1, -1, 3, heads, dim).unbind(2)
    api.fused_recurrent_kda(
        q,
        k,
        v,
        g.unsqueeze(0),
        beta.unsqueeze(0),
        A_log=weights.a_log,
        dt_bias=weights.dt_bias,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=weights.lower_bound,
        cu_seqlens=metadata.cu_seqlens,
        state_pool=pools.state,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        out=out.unsqueeze(0),
        plan=plan,
    )
    kernels = metadata.chunk_table is not None
    gated_norm(out, gate, weights.norm, weights.norm_eps, out, kernels=kernels)
