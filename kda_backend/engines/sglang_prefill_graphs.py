"""Prefill steps of KDA models inside sglang's breakable CUDA graphs.

sglang leaves prefill graphs off for KDA models but GLM-5.3-Flash. A step of few tokens is bound by
its host time, so with this package's flag they are turned on up to `MAX_TOKENS` tokens; what the
user says of them stays, as do all other rules by which sglang turns them off. From 0.5.22 on the
KDA layers are captured too, on tables of `MAX_SEQUENCES` sequences; before, the graph breaks at
each of them.

Upstream's own kernel may not be captured: for Kimi-Linear and Kimi-K3 it takes the logits of step
sizes for step sizes there. Where ours is not installed the graph breaks at the KDA layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.utils.common import is_cuda

from backend_core.engines.sglang_flag import is_requested, say

MAX_TOKENS = 1024
"""Of a step: a captured prefill takes the absorbed form of MLA, which loses beyond."""
BUCKETS = (
    *(8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, MAX_TOKENS),
)
"""Tokens of the graphs. One is replayed for up to twice as few."""
MAX_SEQUENCES = 16
"""Of a captured step; one with more runs outside of graphs."""
_SEQUENCES_VARIABLE = "SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS"


def most_sequences() -> int:
    """Of a captured prefill step."""
    return int(os.environ.get(_SEQUENCES_VARIABLE, MAX_SEQUENCES))


def register() -> None:
    """Wrap the step that resolves sglang's CUDA-graph options."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_cuda_graph_config")(resolve)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """sglang's resolution of its CUDA-graph options, then prefill graphs for a KDA model.

    Only sglang's rule against KDA models is passed over, all others are asked again.
    """
    previous(server_args)
    from sglang.srt.arg_groups import cuda_graph_hook as hook
    from sglang.srt.configs import model_config

    if not (is_requested(server_args) and is_cuda()):
        return
    if not model_config.uses_kda_attention(hook.model_config_of(server_args).hf_config):
        return
    config = hook.resolving_view(server_args).cuda_graph_config
    locked = server_args._cuda_graph_config_locked
    phase = hook.Phase.PREFILL
    if (phase, "backend") in locked or config.prefill.backend != hook.Backend.DISABLED:
        return
    if hook.resolving_view(server_args).enable_memory_saver:
        return  # breakable graphs refuse it as the server starts
    sizes: dict[str, Any] = {}
    if not {(phase, "max_bs"), (phase, "bs")} & locked:
        buckets = _buckets(server_args.chunked_prefill_size)
        sizes = {"max_bs": buckets[-1], "bs": buckets}
    enabled = hook.with_phase(config, phase, backend=hook.Backend.BREAKABLE, **sizes)
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


def _buckets(chunked_prefill_size: int | None) -> list[int]:
    """Tokens of the graphs, up to the longest step that the user allows."""
    most = chunked_prefill_size if chunked_prefill_size and chunked_prefill_size > 0 else MAX_TOKENS
    return [tokens for tokens in BUCKETS if tokens <= most] or [BUCKETS[0]]


def captures_kda(backend: Any) -> bool:
    """Whether sglang's attention backend captures its KDA layers in prefill graphs."""
    return bool(getattr(backend, "use_captured_forward_metadata_for_breakable_cuda_graph", False))


def prepare(backend: Any, runner: Any, *, ours: bool) -> None:
    """Before graphs are captured: fewer sequences, or no KDA layers in them.

    Args:
        backend: sglang's attention backend of a hybrid model.
        ours: whether our kernel serves the prefills of its KDA layers.
    """
    if not captures_kda(backend):
        return
    if not ours:
        # GLM-5.3-Flash's step sizes are right, and sglang turns its graphs on by itself
        if "Glm5NextForConditionalGeneration" in runner.model_config.hf_config.architectures:
            return
        backend.use_captured_forward_metadata_for_breakable_cuda_graph = False
        say("prefill graphs break at the KDA layers, which are upstream's")
        return
    backend.linear_attn_backend.prefill_graph_max_seqs = most_sequences()
    backend.prefill_cuda_graph_max_batch_size = most_sequences()
