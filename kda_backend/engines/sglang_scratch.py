"""Scratch memory of sglang's prefills, taken at load when sglang's pools have theirs.

It comes from the memory that sglang leaves free for its steps, so that a server has as many slots
as without this package: upstream's own prefills take more of it. Prefills that are captured in
CUDA graphs use the same memory: they run between the others, on their stream.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.moe.utils import is_tbo_enabled
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    check_cuda_graph_backend,
)
from sglang.srt.runtime_context import get_parallel, get_schedule

from backend_core.engines.sglang_flag import say
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.engines.prefill_calls import PARTIAL_CHUNKS
from kda_backend.engines.sglang_prefill_graphs import most_sequences
from kda_backend.operators import kda_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.spec import CHUNK
from kda_backend.step_plan import build_step_plan

_ASKED_SLOTS = "_kda_dsv4_asked_slots"  # on a ModelRunner: the user says how many it has
_TAKEN = "_kda_dsv4_scratch"  # on a ModelRunner: what `take_scratch` has returned
_SEQUENCES = 1 + PARTIAL_CHUNKS
"""Requests that share the tokens of one call's largest chunks: 16 of one token beside a long one. A
step with more chunks is several calls (`prefill_calls.divided`)."""
_LEAST_LIMIT = 2048  # of requests, with slots and memory for all of them


def state_dtype_of(runner: Any) -> torch.dtype:
    """The dtype of the states that a ModelRunner's pools will have: ``--mamba-ssm-dtype``."""
    found: torch.dtype = mambaish_config(runner.model_config).mamba2_cache_params.dtype.temporal
    return found


def note_asked_slots(runner: Any) -> None:
    """Keep what the user says of a ModelRunner's slots, before sglang sizes its pools."""
    setattr(runner, _ASKED_SLOTS, get_schedule().max_mamba_cache_size is not None)


def take_scratch(runner: Any, selection: KdaSelection) -> tuple[Scratch | None, int | None]:
    """Scratch memory for the largest prefill step of a ModelRunner, and the most chunks of a call;
    ``None`` for what `note_asked_slots` has not seen, and where calls are not divided.

    Pools are allocated. The attention backends of one ModelRunner, of which sglang builds one for
    each length of drafts (``--speculative-adaptive``) and three for ``--enable-two-batch-overlap``,
    share it: their prefills run one after another.
    """
    if not hasattr(runner, _ASKED_SLOTS):
        return None, None
    if (taken := getattr(runner, _TAKEN, None)) is not None:
        shared: tuple[Scratch, int | None] = taken
        return shared
    # a batch that two-batch overlap has cut may end inside of a request
    divides = not is_tbo_enabled()
    tokens, requests = largest_prefill(runner, selection, divides=divides)
    scratch = Scratch(torch.device(runner.device))
    grow(scratch, selection, tokens, requests, state_dtype_of(runner))
    say(
        f"scratch memory of {tokens} tokens of {requests} requests is"
        f" {scratch.nbytes / 2**20:.0f} MiB, beside the pools"
    )
    if _chunk_of_a_prompt() is None:
        say(f"prompts are not cut, and one of more than {tokens} tokens takes more")
    chunks = -(-(tokens - requests + 1) // CHUNK) + requests - 1
    setattr(runner, _TAKEN, (scratch, chunks if divides else None))
    return scratch, chunks if divides else None


def gain_of_16_bits(runner: Any) -> str | None:
    """Say what states in fp16 would change, where fp32 states bound how many requests run.

    Pools are allocated. sglang gives the states a share of the memory, so slots grow as they
    shrink.
    """
    if getattr(runner, _ASKED_SLOTS, True) or state_dtype_of(runner) != torch.float32:
        return None
    schedule, runs = get_schedule(), runner.max_running_requests
    most = _LEAST_LIMIT
    if schedule.max_running_requests is not None:
        most = schedule.max_running_requests // get_parallel().attn_dp_size
    if runs >= most:
        return None
    params = mambaish_config(runner.model_config).mamba2_cache_params
    state = math.prod(params.shape.temporal) * len(params.layers)
    slot = params.mamba_cache_per_req
    would = min(most, int(runs * slot / (slot - 2 * state)))
    return (
        f"fp32 states bound this server to {runs} requests at a time: --mamba-ssm-dtype float16"
        f" would let about {would} run"
    )


def largest_prefill(runner: Any, selection: KdaSelection, *, divides: bool) -> tuple[int, int]:
    """Tokens and requests of the largest prefill call that sglang's scheduler can make of a model;
    ``divides``: a step of more chunks is several calls."""
    schedule = get_schedule()
    tokens = _chunk_of_a_prompt() or schedule.max_prefill_tokens
    requests = runner.max_running_requests
    # with --enable-mixed-chunk the step's decodes come on top of the requests that it admits
    if schedule.prefill_max_requests is not None and not schedule.enable_mixed_chunk:
        requests = min(requests, schedule.prefill_max_requests)
    if divides:
        requests = min(requests, _SEQUENCES)
    if check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE):
        # a captured step has as many sequences, however few requests the server runs
        requests = max(requests, most_sequences(selection.shape.num_value_heads))
    return tokens, max(1, min(requests, tokens))


def _chunk_of_a_prompt() -> int | None:
    """``--chunked-prefill-size`` as sglang resolved it; ``None`` where prompts are not cut."""
    size = get_schedule().chunked_prefill_size
    return None if size is None or size < 1 else int(size)


def grow(
    scratch: Scratch,
    selection: KdaSelection,
    tokens: int,
    requests: int,
    state_dtype: torch.dtype,
) -> None:
    """Grow ``scratch`` to what a prefill of so many tokens and requests takes, by running it.

    No division of the tokens among so many requests makes more chunks than one long request and
    others of one token; each path of the selection runs it.
    """
    shape, device = selection.shape, scratch.flags().device
    lengths = [tokens - requests + 1] + [1] * (requests - 1)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    heads, key_dim = shape.num_value_heads, shape.key_dim

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(1, tokens, *size, dtype=shape.dtype, device=device)

    keys, g = zeros(shape.num_heads, key_dim), zeros(heads, key_dim)
    inputs = TokenInputs.of(keys, keys, zeros(heads, shape.value_dim), g, g[..., 0])
    parameters = torch.zeros(heads, 1 + key_dim, device=device)
    gate = GateSpec.of(
        parameters[:, 0].contiguous(),
        parameters[:, 1:].contiguous(),
        -5.0 if shape.bounded_gate else None,
    )
    pool = torch.zeros(1, heads, shape.value_dim, key_dim, dtype=state_dtype, device=device)
    state = StateRef.pool(pool, torch.full((requests,), -1, dtype=torch.int32, device=device))
    tables = selection.target.vendor != "cpu"
    step_plan = build_step_plan(
        bounds.to(device), tokens, cu_seqlens_cpu=bounds, chunk_table=tables
    )
    for path in dict.fromkeys(selection.prefill.rows):
        forced = selection.with_path(path)
        kda_prefill(inputs, gate, state, step_plan, scratch=scratch, selection=forced)
