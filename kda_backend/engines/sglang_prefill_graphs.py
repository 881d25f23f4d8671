"""Prefill steps of KDA models inside sglang's breakable CUDA graphs.

sglang leaves prefill graphs off for KDA models but GLM-5.3-Flash. A step that is not captured is
bound by its host time, so with this package's flag they are turned on, up to the tokens of
`prefill_graphs`; what the user says of them stays, as do all other rules by which sglang turns them
off. The KDA layers are captured too, on tables of `most_sequences`. sglang turns graphs on for
Ling-V3, but captures none, as it does not find the MLA layers; they are handed over (`_with_mla`).

A captured MLA layer takes its absorbed form, whose attention reads latents of 576 channels instead
of keys of 192, and costs the more the longer the prompt. In graphs of more than `ABSORBED_TOKENS`
such a layer runs outside of the graph as a whole (`sglang_mla_breaks`), in the form that sglang
gives the batch.

sglang keeps 1.5 GiB of its pools free for prefill graphs of any model with MLA. Graphs of these
sizes take a fraction of it, and the rest goes back to the pools (`reserve`).

Upstream's own kernel may not be captured: for Kimi-Linear and Kimi-K3 it takes the logits of step
sizes for step sizes there. Where ours is not installed the graph breaks at the KDA layers.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.configs.hybrid_arch import hybrid_kda_config
from sglang.srt.utils.common import is_cuda

from backend_core.engines import seams
from backend_core.engines.sglang_flag import is_deterministic, is_requested, say
from kda_backend.engines.prefill_graphs import most_tokens, sizes
from kda_backend.engines.sglang_seams import SGLANG_LING_GRAPHS, SGLANG_MLA_BREAKS

ABSORBED_TOKENS = 1024
"""Tokens of the largest graph that holds MLA layers in their absorbed form."""
_MOST_TOKENS = 8192  # sglang's ceiling for MLA, where the user does not bound a step
_TASKS = (
    512  # sequences times value heads of a rank, each a task of the scan also where it is empty
)
_MIB_OF_MLA = 1536  # what sglang reserves for prefill graphs of models with MLA
_SEQUENCES_VARIABLE = "SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS"


def most_sequences(value_heads: int) -> int:
    """Sequences of a captured prefill step, whose tables have a place for each; a step with more
    runs outside of graphs.

    Args:
        value_heads: of a KDA layer on this rank.

    Raises:
        ValueError: sglang's variable for it is no positive number.
    """
    said = os.environ.get(_SEQUENCES_VARIABLE)
    if not said:
        return min(128, max(16, _TASKS // value_heads))
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"{_SEQUENCES_VARIABLE} must be a positive number, got {said!r}")
    return int(said)


def register() -> None:
    """Wrap the steps that resolve sglang's CUDA-graph options and its memory."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_cuda_graph_config")(resolve)
    register_resolution_hook("handle_gpu_memory_settings")(reserve)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """sglang's resolution of its CUDA-graph options, then prefill graphs for a KDA model.

    Only sglang's rule against KDA models is passed over, all others are asked again.
    """
    previous(server_args)
    from sglang.srt.arg_groups import cuda_graph_hook as hook
    from sglang.srt.configs import model_config

    if not (is_requested(server_args) and is_cuda()):
        return
    model = hook.model_config_of(server_args)
    if model_config.uses_kda_attention(model.hf_config):
        as_upstream = hook.Backend.DISABLED
    elif _is_ling(model):
        as_upstream = hook.Backend.BREAKABLE  # until sglang looks for its layers
    else:
        return
    found = hook.resolving_view(server_args)
    config = found.cuda_graph_config
    locked = server_args._cuda_graph_config_locked
    phase = hook.Phase.PREFILL
    if (phase, "backend") in locked or config.prefill.backend != as_upstream:
        return
    if _stay_off(server_args, found):
        return
    resolved: dict[str, Any] = {}
    if not {(phase, "max_bs"), (phase, "bs")} & locked:
        buckets = _buckets(found, model.hf_text_config)
        resolved = {"max_bs": buckets[-1], "bs": buckets}
    enabled = hook.with_phase(config, phase, backend=hook.Backend.BREAKABLE, **resolved)
    hook.declare_resolution(server_args, "kda_dsv4_prefill_graphs", cuda_graph_config=enabled)
    rule = model_config.uses_kda_attention
    try:
        model_config.uses_kda_attention = lambda config: False
        hook.apply_cuda_graph_compatibility(server_args)
    finally:
        model_config.uses_kda_attention = rule
    hook.apply_deepep_adjustments(server_args)
    hook.apply_cuda_graph_disaggregation_roles(server_args)
    final = hook.resolving_view(server_args).cuda_graph_config.prefill
    if final.backend == hook.Backend.BREAKABLE:
        say(
            f"prefill steps of up to {final.max_bs} tokens run in breakable CUDA graphs"
            " (--disable-prefill-cuda-graph turns them off)"
        )


def reserve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """sglang's resolution of its memory, with nothing reserved for graphs of our sizes.

    What they take, and the scratch memory, a step of upstream's without such graphs takes too.
    """
    from sglang.srt.arg_groups import cuda_graph_hook as hook
    from sglang.srt.arg_groups import memory_hook

    found = hook.resolving_view(server_args)
    prefill = found.cuda_graph_config.prefill
    upstream = memory_hook.reserve_for_graph_mb
    if not (is_requested(server_args) and is_cuda() and prefill.backend == hook.Backend.BREAKABLE):
        return previous(server_args)
    model = hook.model_config_of(server_args)
    if prefill.bs != _buckets(found, model.hf_text_config):
        return previous(server_args)

    def reserve_for_graph_mb(args: Any) -> float:
        asked: float = upstream(args)
        return asked - _MIB_OF_MLA if memory_hook.use_mla_backend(args) else asked

    memory_hook.reserve_for_graph_mb = reserve_for_graph_mb
    try:
        previous(server_args)
    finally:
        memory_hook.reserve_for_graph_mb = upstream


def _buckets(found: Any, text_config: Any) -> list[int]:
    """Tokens of the graphs, up to the longest step that the user allows.

    Args:
        found: sglang's arguments, as far as they are resolved.
        text_config: the model's, whose MLA layers may run outside of graphs.
    """
    chunk = found.chunked_prefill_size
    budget = chunk if chunk and chunk > 0 else _MOST_TOKENS
    most = min(budget, ABSORBED_TOKENS)
    if mla_runs_outside(text_config):
        ranks = found.tp_size // found.attn_dp_size
        most = max(most, most_tokens(text_config.hidden_size, ranks, budget))
    return sizes(most)


def mla_runs_outside(text_config: Any) -> bool:
    """Whether `sglang_mla_breaks` can run the MLA layers of a model outside of its graphs.

    The latents of compressed queries are computed beside the layer's norm, which is captured.
    """
    return (
        getattr(text_config, "q_lora_rank", None) is None
        and hasattr(text_config, "kv_lora_rank")
        and seams.difference(SGLANG_MLA_BREAKS) is None
    )


def _is_ling(model: Any) -> bool:
    """Whether a model is Ling-V3, of which sglang's rule for KDA models does not know, and its MLA
    layers can be handed over.

    Args:
        model: sglang's ModelConfig.
    """
    from sglang.srt.configs import model_config

    return (
        not model_config.uses_kda_attention(model.hf_config)
        and hybrid_kda_config(model) is not None
        and seams.refusal(SGLANG_LING_GRAPHS) is None
    )


def _stay_off(server_args: Any, found: Any) -> bool:
    """Whether nothing is captured that sglang leaves eager.

    Args:
        found: sglang's arguments, as far as they are resolved.
    """
    return bool(
        found.enable_memory_saver  # breakable graphs refuse it as the server starts
        # a graph's breaks run outside of the calls that bring weights from host memory
        or _offloads_weights(found)
        # a captured MLA layer takes another form, by the size of the step
        or is_deterministic(server_args)
    )


def _offloads_weights(found: Any) -> bool:
    """Whether sglang's resolved arguments keep weights of layers in host memory."""
    return bool(found.cpu_offload_gb > 0 or found.offload_group_size > 0)


def captures_kda(backend: Any) -> bool:
    """Whether sglang's attention backend captures its KDA layers in prefill graphs."""
    return bool(getattr(backend, "use_captured_forward_metadata_for_breakable_cuda_graph", False))


def prepare(backend: Any, runner: Any, *, ours: bool) -> None:
    """Before graphs are captured: fewer sequences, or no KDA layers in them; MLA layers outside.

    Args:
        backend: sglang's attention backend of a hybrid model.
        ours: whether our kernel serves the prefills of its KDA layers.
    """
    if not captures_kda(backend):
        return
    outside = mla_runs_outside(runner.model_config.hf_text_config)
    if outside and not _offloads_weights(runner.server_args):
        from kda_backend.engines.sglang_mla_breaks import break_at_mla

        break_at_mla(runner.model, ABSORBED_TOKENS)
    if not ours:
        # GLM-5.3-Flash's step sizes are right, and sglang turns its graphs on by itself
        if "Glm5NextForConditionalGeneration" in runner.model_config.hf_config.architectures:
            return
        backend.use_captured_forward_metadata_for_breakable_cuda_graph = False
        say("prefill graphs break at the KDA layers, which are upstream's")
        return
    kernel = backend.linear_attn_backend.kernel_dispatcher.extend_kernel
    sequences = most_sequences(kernel.selection.shape.num_value_heads)
    backend.linear_attn_backend.prefill_graph_max_seqs = sequences
    backend.prefill_cuda_graph_max_batch_size = sequences
    if _is_ling(runner.model_config) and not _stay_off(runner.server_args, runner.server_args):
        runner.get_cuda_graph_layers = functools.partial(_with_mla, runner.get_cuda_graph_layers)


def _with_mla(upstream: Callable[[Any], Any], model: Any) -> Any:
    """The layers that sglang looks for in a model before it captures prefills, with the MLA layers
    of Ling-V3: without one of each layer it captures nothing.

    Ling's layers run in inference mode, whose tensors cannot be written outside of it, and sglang
    replays a graph's breaks without it. So they run without gradients, as all of sglang does.
    Graphs that give a drafter the states of layers have not been run, and are not captured.
    """
    found = upstream(model)
    if getattr(model, "capture_aux_hidden_states", False):
        return found
    for number, layer in enumerate(model.layers):
        mla: Any = getattr(layer, "attention", None)
        if found.attention_layers[number] is None and hasattr(mla, "attn_mqa"):
            found.attention_layers[number] = mla.attn_mqa
            found.mha_companion_layers[number] = getattr(mla, "attn_mha", None)
        if mla is not None:
            layer.forward = functools.partial(inspect.unwrap(type(layer).forward), layer)
    return found
