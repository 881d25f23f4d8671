"""The operators with the parts of their typed values as arguments, named as in messages."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from kda_backend import (
    LOG_DECAY,
    ConvInputs,
    DraftInputs,
    GateSpec,
    NormInputs,
    StateRef,
    TokenInputs,
    chunk_kda,
    fused_recurrent_kda,
    kda_decode_step,
    kda_prefill,
    kda_recurrent,
    kda_verify_step,
)
from kda_backend.spec import Beta
from kda_backend.testing.steps import EPS, StepCase

Arguments = dict[str, Any]
TOKENS = ("q", "k", "v", "g", "beta")


def prefill(**given: Any) -> Any:
    """``chunk_kda`` where all arguments are FLA's, else ``kda_prefill``."""
    if given.keys() <= inspect.signature(chunk_kda).parameters.keys():
        return chunk_kda(**given)
    inputs, state = inputs_of(given), _state_of(given)
    keeps = given.pop("return_intermediate_states", False)
    cu_seqlens = given.pop("cu_seqlens", None)
    plan = given.pop("step_plan", cu_seqlens)
    o, final_state, states = kda_prefill(*inputs, state, plan, keeps_chunk_states=keeps, **given)
    if states is None:
        return o, final_state
    rows = len(o) if plan is None else 1
    return o, final_state, states.view(rows, len(states) // max(rows, 1), *states.shape[1:])


def recurrent(**given: Any) -> Any:
    """``fused_recurrent_kda`` where all arguments are FLA's, else ``kda_recurrent``."""
    if given.keys() <= inspect.signature(fused_recurrent_kda).parameters.keys():
        return fused_recurrent_kda(**given)
    inputs, state = inputs_of(given), _state_of(given)
    return kda_recurrent(*inputs, state, given.pop("cu_seqlens", None), **given)[:2]


def decode_step(**given: Any) -> torch.Tensor:
    inputs, state, stages = inputs_of(given), _pool_of(given), _stages_of(given)
    return kda_decode_step(*inputs, state, **stages, **given)


def verify_step(**given: Any) -> torch.Tensor:
    inputs, state, stages = inputs_of(given), _pool_of(given), _stages_of(given)
    kept = [given.pop(f"intermediate_{name}", None) for name in ("states", "indices", "conv")]
    cu_seqlens = given.pop("cu_seqlens", None)
    draft = DraftInputs(cu_seqlens, given.pop("num_accepted_tokens", None), *kept)
    return kda_verify_step(*inputs, state, draft, **stages, **given)


def step_arguments(case: StepCase, windows: torch.Tensor) -> Arguments:
    """Those of a step, but for states."""
    tokens, gate = case.inputs
    found: Arguments = {**dict(zip(TOKENS, case.tokens, strict=True)), "gate": gate}
    found |= {name: getattr(tokens, name) for name in ("beta_kind", "l2norm")}
    if case.has_conv:
        found |= {"conv_state": windows, "conv_weight": case.conv_weight}
        found["conv_bias"] = case.conv_bias if case.has_bias else None
    if case.has_norm:
        found |= {"norm_weight": case.norm_weight, "norm_gate": case.z}
    return found


def inputs_of(given: Arguments) -> tuple[TokenInputs, GateSpec]:
    """Takes tokens and gate out of the arguments: typed, or as FLA names them."""
    tokens = [given.pop(name) for name in TOKENS]
    kind = Beta.SIGMOID if given.pop("use_beta_sigmoid_in_kernel", False) else Beta.GIVEN
    kind = Beta.TWICE_SIGMOID if given.pop("allow_neg_eigval", False) else kind
    l2norm = given.pop("use_qk_l2norm_in_kernel", False)
    inputs = TokenInputs.of(
        *tokens,
        beta_kind=given.pop("beta_kind", kind),
        l2norm=given.pop("l2norm", l2norm),
        scale=given.pop("scale", None),
    )
    uses_gate = given.pop("use_gate_in_kernel", False)
    a_log, dt_bias, bound = (given.pop(n, None) for n in ("A_log", "dt_bias", "lower_bound"))
    gate = given.pop("gate", None)
    if gate is None:
        gate = GateSpec.of(a_log, dt_bias, bound) if uses_gate else LOG_DECAY
    elif a_log is not None or dt_bias is not None:
        gate = gate._replace(a_log=a_log if dt_bias is None else gate.a_log)
        gate = gate if dt_bias is None else gate._replace(dt_bias=dt_bias)
    return inputs, gate


def _pool_of(given: Arguments) -> StateRef:
    null_slot = given.pop("null_slot", None)
    return StateRef.pool(given.pop("state_pool"), given.pop("state_indices"), null_slot=null_slot)


def _state_of(given: Arguments) -> StateRef:
    """Takes the states out: a pool where there is one, else those of FLA."""
    names = ("initial_state", "output_final_state", "state_v_first")
    initial, final, v_first = (given.pop(name, None) for name in names)
    names = ("state_pool", "state_indices", "has_initial_state")
    pool, indices, has_initial = (given.pop(name, None) for name in names)
    names = ("snapshot_chunks", "snapshots", "snapshot_indices")
    chunks, snapshots, slots = (given.pop(name, None) for name in names)
    if pool is None:
        state = StateRef.functional(initial, v_first=bool(v_first), final=bool(final))
    else:
        state = StateRef.pool(pool, indices, has_initial)
    return state if chunks is None else state.with_snapshots(chunks, snapshots, slots)


def _stages_of(given: Arguments) -> Arguments:
    windows, weight, bias = (given.pop(f"conv_{x}", None) for x in ("state", "weight", "bias"))
    norm_weight, norm_gate = (given.pop(f"norm_{x}", None) for x in ("weight", "gate"))
    return {
        "conv": None if windows is None else ConvInputs(windows, weight, bias),
        "norm": None if norm_weight is None else NormInputs(norm_weight, norm_gate, EPS),
    }
