"""sglang: cuts of prompts under ``--enable-deterministic-inference``, and states that resume.

A step takes as many tokens of a prompt as the other requests leave it, rounded to pages. The bits
of a KDA layer stay the same if every cut lies at a multiple of 64 tokens (docs/reliability.md), so
pages have 64 tokens there unless the user says otherwise. sglang's prefix cache also keeps states
that decodes have left, one every ``--mamba-track-interval`` tokens, which becomes an interval that
no request reaches. Where it keeps the state of a request's end instead, it is off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backend_core.engines import seams
from backend_core.engines.sglang_flag import is_deterministic, is_requested, say
from kda_backend.engines.sglang_seams import SGLANG_CUTS
from kda_backend.spec import CHUNK

NO_STATE_OF_A_DECODE = 1 << 30
"""An interval of tokens that no request reaches; a multiple of every page."""
_SOURCE = "kda_dsv4_cuts"


def register() -> None:
    """Wrap the step in which sglang resolves what follows from the option."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_deterministic_inference")(resolve)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """sglang's step, then pages and the prefix cache of a server with KDA layers."""
    previous(server_args)
    from sglang.srt.arg_groups.cuda_graph_hook import (
        declare_resolution,
        model_config_of,
        resolving_view,
    )
    from sglang.srt.configs.hybrid_arch import hybrid_kda_config

    if not (is_requested(server_args) and is_deterministic(server_args)):
        return
    if hybrid_kda_config(model_config_of(server_args)) is None:
        return
    found = resolving_view(server_args)
    if found.page_size is None:
        declare_resolution(server_args, _SOURCE, page_size=CHUNK)
        say(f"pages have {CHUNK} tokens, so that prompts are cut at multiples of {CHUNK}")
    if found.disable_radix_cache:
        return
    if _keeps_states_of_prefills(found):
        declare_resolution(server_args, _SOURCE, mamba_track_interval=NO_STATE_OF_A_DECODE)
        say("cached prefixes of KDA layers end where prefills left states, not decodes")
    else:
        declare_resolution(server_args, _SOURCE, disable_radix_cache=True)
        say(
            "the prefix cache is off: it would resume KDA layers from states that decodes have"
            " left, or that were rounded, whose bits are not those of a prefill"
            " (--mamba-radix-cache-strategy extra_buffer keeps others)"
        )


def refusal(server_args: Any, state_dtype: torch.dtype) -> str | None:
    """Why the bits of a request would depend on others in a server, whose arguments are resolved;
    the end of a sentence."""
    from sglang.srt.arg_groups.cuda_graph_hook import resolving_view

    found = resolving_view(server_args)
    if (reason := seams.refusal(SGLANG_CUTS)) is not None:
        return reason
    if state_dtype != torch.float32:
        return (
            f"states in {str(state_dtype).removeprefix('torch.')} are rounded wherever a step ends,"
            " which depends on other requests: --mamba-ssm-dtype float32 keeps them"
        )
    if found.enable_mixed_chunk:
        return "--enable-mixed-chunk runs decodes in the kernels of prefills"
    for name in ("page_size", "chunked_prefill_size"):
        value = getattr(found, name)
        if value is not None and value > 0 and value % CHUNK:
            flag = name.replace("_", "-")
            return f"--{flag} must be a multiple of {CHUNK}, where prompts may be cut, got {value}"
    if found.enable_dynamic_chunking or found.schedule_policy == "shortest-prefill-first":
        return "dynamic chunks and --schedule-policy shortest-prefill-first cut prompts anywhere"
    if not found.disable_radix_cache and not (
        _keeps_states_of_prefills(found) and found.mamba_track_interval >= NO_STATE_OF_A_DECODE
    ):
        return "the prefix cache keeps states that decodes have left"
    return None


def _keeps_states_of_prefills(found: Any) -> bool:
    """Whether cached states are those at places of prefills, as they were."""
    strategy = found.mamba_radix_cache_strategy
    return strategy.startswith("extra_buffer") and not found.enable_int8_mamba_checkpoint
