"""Common parts of vLLM's KDA layers on this backend, whatever the model.

A layer asks for its `Runtime` as it is built (`runtime_of`) and calls `attend` between its
projections.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from backend_core.engines import seams
from backend_core.engines.log import chosen
from backend_core.engines.vllm_flag import batch_invariant, log_failed_step, requested, say
from backend_core.strict import fallback
from backend_core.target import detect_target
from kda_backend.contract.tensors import STATES
from kda_backend.engines import vllm_cuts, vllm_drafts
from kda_backend.engines.prefill_calls import PARTIAL_CHUNKS
from kda_backend.engines.vllm_profile import has_aligned_states, profile
from kda_backend.engines.vllm_run import Runtime, pools_of, run_any_batch, run_step
from kda_backend.engines.vllm_tables import tables_of_pass
from kda_backend.layer import LayerWeights, Projections
from kda_backend.prefill.arguments_sm90 import Track, variant_of_engine
from kda_backend.prefill.paths import begin_to_compile
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaShape, deterministic_prefix, rounded_prefix, select
from kda_backend.spec import CHUNK

_PLANS = "_kda_dsv4_plans"  # on vLLM's ForwardContext, of which each pass has its own


def runtime_of(
    vllm_config: VllmConfig,
    module: Any,
    lower_bound: float | None,
    part: seams.Part,
    *,
    checkpoints: bool = False,
    refusal: str | None = None,
) -> Runtime | None:
    """The runtime of a model's layers where the flag asks for it and a path serves them.

    What was chosen is logged once. What is refused runs on upstream code and is logged once, or
    raises in strict mode.

    Args:
        module: the engine's layer: its heads, states and caches.
        lower_bound: of its gate; ``None`` without one.
        part: what is relied on of the layer.
        checkpoints: its metadata may ask for states inside of prefills.
        refusal: why a layer of this kind cannot be served, which its adapter has found.
    """
    name = requested(vllm_config)
    if name is None:
        return None
    dtype, heads, dim = vllm_config.model_config.dtype, module.local_num_heads, module.head_dim
    shape = KdaShape(
        *(heads, heads, dim, dim, lower_bound is not None, dtype, dtype),
        deterministic_prefix=deterministic_prefix(),
        batch_invariant=batch_invariant(),
    )
    refusal = refusal or seams.refusal(part) or _refusal(vllm_config, module, lower_bound)
    speculative = vllm_config.speculative_config
    if refusal is None:
        try:
            runtime = _runtime(
                torch.device(vllm_config.device_config.device_type),
                replace(shape, aligned_state=has_aligned_states(module)),
                vllm_config.scheduler_config.max_num_seqs,
                vllm_config.scheduler_config.max_num_batched_tokens,
                0 if speculative is None else 1 + speculative.num_speculative_tokens,
                vllm_config.parallel_config.use_ubatching,
                checkpoints and vllm_config.cache_config.mamba_cache_mode == "align",
                module.get_state_dtype()[1],
            )
        except (LookupError, ValueError) as error:
            refusal = str(error)
        else:
            vllm_drafts.keep_records(vllm_config, module, lower_bound, runtime.selection.target)
            return runtime
    fallback(f"--attention-backend {name}: {refusal}{vllm_drafts.warning(vllm_config, module)}")
    return None


def _refusal(vllm_config: VllmConfig, module: Any, lower_bound: float | None) -> str | None:
    if batch_invariant() and (reason := _refusal_of_bits(vllm_config, module)) is not None:
        return f"VLLM_BATCH_INVARIANT is set, and {reason}"
    if (records := vllm_drafts.refusal(vllm_config, module)) is not None:
        return records
    state_dtype = module.get_state_dtype()[1]
    if state_dtype not in STATES:
        return f"the KDA state must be float32, bfloat16 or float16, got {state_dtype}"
    if vllm_config.mamba_config.enable_stochastic_rounding:
        return (
            "--enable-mamba-cache-stochastic-rounding is set, and KDA states are rounded to the"
            " nearest number here"
        )
    if module.conv_size != 4:
        return f"the short convolution must have 4 taps, got {module.conv_size}"
    if module.head_dim > 128:
        return f"KDA heads must have at most 128 channels, got {module.head_dim}"
    if lower_bound is not None and not -5.0 <= lower_bound < 0.0:
        return f"the lower bound of the KDA gate must be in [-5, 0), got {lower_bound}"
    options = vllm_config.additional_config
    for option in ("kda_prefill_backend", "kda_decode_backend", "kda_spec_decode_backend"):
        chosen = options.get(option, "auto") if isinstance(options, dict) else "auto"
        if chosen not in ("auto", "triton"):
            return f"{option} asks for the kernels of {chosen}"
    return None


def _refusal_of_bits(vllm_config: VllmConfig, module: Any) -> str | None:
    if (state := module.get_state_dtype()[1]) != torch.float32:
        return (
            f"states in {str(state).removeprefix('torch.')} are rounded wherever a step ends, which"
            " depends on other requests: --mamba-ssm-cache-dtype float32 keeps them"
        )
    return vllm_cuts.refusal(vllm_config)


@functools.cache
def _runtime(
    device: torch.device,
    shape: KdaShape,
    max_sequences: int,
    max_tokens: int,
    max_draft: int,
    concurrent: bool,
    checkpoints: bool,
    state_dtype: torch.dtype,
) -> Runtime:
    selection = select(detect_target(device), shape)
    gate = "bounded" if shape.bounded_gate else "unbounded"
    states = f"{str(state_dtype).removeprefix('torch.')} states"
    facts = f"{shape.num_value_heads} heads of {shape.value_dim} per rank, {gate} gate, {states}"
    rows, operators = selection.explain(), selection.operators
    say(*chosen("KDA layers", selection.target, facts, rows, operators))
    if (note := rounded_prefix(shape, state_dtype)) is not None:
        say(note)
    # while weights load; the profile run waits for what is not ready
    tracks = (Track.NONE, Track.POOL) if checkpoints else (Track.NONE,)
    begin_to_compile(
        selection,
        [variant_of_engine(shape.bounded_gate, state_dtype, track=track) for track in tracks],
    )
    # Two micro-batches run layers at the same time: each call then has memory of its own.
    scratch = None if concurrent else Scratch(device)
    most_chunks = -(-max_tokens // CHUNK) + PARTIAL_CHUNKS
    return Runtime(selection, scratch, max_sequences, most_chunks, max_draft, checkpoints)


def attend(
    module: Any,
    weights: LayerWeights,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """A layer between its projections; see `log_failed_step` for what an exception does.

    Args:
        module: the layer of ours: its runtime, its prefix and its cache.
        qkv: ``[T, 3 H D]``; g, gate: ``[T, H, D]``; beta: ``[T, H]``; all before activation. T may
            be padded.
        out: ``[T, H, D]``, written; zeros where T is padding.
    """
    context = get_forward_context()
    metadata = context.attn_metadata
    metadata = metadata.get(module.prefix) if isinstance(metadata, dict) else None
    x = Projections(qkv, g, beta, gate, out)
    if metadata is None:
        profile(module, weights, x)
        return
    try:
        plans = vars(context).setdefault(_PLANS, {})
        if (tables := tables_of_pass()) is None:
            run_step(module, weights, x, metadata, plans)
            return
        given = module.prefix, context.attn_metadata, out.shape[0], plans
        run_any_batch(module.kda_runtime, weights, x, pools_of(module), *tables.rows_of(*given))
    except Exception as error:
        log_failed_step(f"KDA layer {module.prefix}", error)
        raise
