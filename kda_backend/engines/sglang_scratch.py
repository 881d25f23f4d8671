"""Scratch memory of sglang's prefills, taken before sglang sizes its pools.

sglang gives its pools a share of what is free after the weights are loaded: memory that is taken by
then is in its account, and memory that a step takes later is not. Prefills that are captured in
CUDA graphs use the same memory: they run between the others, on their stream.
"""

from __future__ import annotations

import gc
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    check_cuda_graph_backend,
)
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule
from sglang.srt.utils.common import get_available_gpu_memory

from backend_core.engines.sglang_flag import say
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.engines.prefill_calls import PARTIAL_CHUNKS
from kda_backend.engines.sglang_prefill_graphs import most_sequences
from kda_backend.operators import kda_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.spec import CHUNK
from kda_backend.step_plan import build_step_plan

_RESERVED = "_kda_dsv4_reserved"  # on a ModelRunner, from one function here to the other
# What sglang allows where --max-running-requests does not say, and the least number of state slots
# that it counts for a request where prefixes are cached (``resolve_max_num_reqs``).
_MOST_REQUESTS, _SLOTS_OF_A_REQUEST = 4096, 3
_SEQUENCES = 1 + PARTIAL_CHUNKS
"""Requests that share the tokens of one call's largest chunks: 16 of one token beside a long one. A
step with more chunks is several calls (`prefill_calls.divided`)."""
_LEAST_LIMIT = 2048  # of requests, with slots and memory for all of them


@dataclass(frozen=True)
class Reserved:
    """Scratch memory that was taken for prefills of so many tokens and requests.

    Attributes:
        state_dtype: of the pools to come.
        asked_slots: the user says how many slots they will have.
        divides: steps of more chunks are several calls.
    """

    scratch: Scratch
    tokens: int
    requests: int
    state_dtype: torch.dtype
    asked_slots: bool = False
    divides: bool = False

    @property
    def chunks(self) -> int:
        """Those that it was taken for."""
        return -(-(self.tokens - self.requests + 1) // CHUNK) + self.requests - 1


def state_dtype_of(runner: Any) -> torch.dtype:
    """The dtype of the states that a ModelRunner's pools will have: ``--mamba-ssm-dtype``."""
    found: torch.dtype = mambaish_config(runner.model_config).mamba2_cache_params.dtype.temporal
    return found


def reserve_scratch(runner: Any, selection: KdaSelection, num_layers: int) -> None:
    """Take what the largest prefill step of a ModelRunner needs, and leave it with the runner.

    Weights are loaded, pools are not sized yet. ``num_layers``: KDA layers on this rank.
    """
    state_dtype, asked = state_dtype_of(runner), get_schedule().max_mamba_cache_size
    tokens, requests = largest_prefill(runner, num_layers)
    # with attention in data parallel the host does not know the lengths of padded steps
    if divides := get_parallel().attn_dp_size == 1:
        requests = min(requests, _SEQUENCES)
    if check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE):
        # a captured step has as many sequences, however few requests the server runs
        captured = most_sequences(selection.shape.num_value_heads)
        requests = max(requests, min(captured, tokens))
    scratch = Scratch(torch.device(runner.device))
    grow(scratch, selection, tokens, requests, state_dtype)
    reserved = Reserved(scratch, tokens, requests, state_dtype, asked is not None, divides)
    setattr(runner, _RESERVED, reserved)
    say(
        f"scratch memory of {tokens} tokens of {requests} requests is"
        f" {scratch.nbytes / 2**20:.0f} MiB, taken before the pools are sized"
    )
    if _chunk_of_a_prompt() is None:
        say(f"prompts are not cut, and one of more than {tokens} tokens takes more")


def reserved_scratch(runner: Any, selection: KdaSelection) -> tuple[Scratch | None, int | None]:
    """What `reserve_scratch` took, and the most chunks of a call; more, and a line in the log, if
    more requests can run and are one call.

    Pools are allocated. ``None`` where nothing was taken, and where calls are not divided.
    """
    reserved: Reserved | None = runner.__dict__.pop(_RESERVED, None)
    if reserved is None:
        return None, None
    if reserved.divides:
        return reserved.scratch, reserved.chunks
    requests = min(runner.max_running_requests, reserved.tokens)
    if requests > reserved.requests:
        grow(reserved.scratch, selection, reserved.tokens, requests, reserved.state_dtype)
        say(
            f"{requests} requests run where {reserved.requests} were expected: scratch"
            f" memory is {reserved.scratch.nbytes / 2**20:.0f} MiB, beside the pools"
        )
    return reserved.scratch, None


def gain_of_16_bits(runner: Any) -> str | None:
    """What states in fp16 would change, where fp32 states bound how many requests run.

    Pools are allocated, and `reserved_scratch` has not been called. sglang gives the states a share
    of the memory, so slots grow as they shrink.
    """
    reserved: Reserved | None = runner.__dict__.get(_RESERVED)
    if reserved is None or reserved.asked_slots or reserved.state_dtype != torch.float32:
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


def largest_prefill(runner: Any, num_layers: int) -> tuple[int, int]:
    """Tokens and requests of the largest prefill that sglang's scheduler can make of a model.

    A step has no more requests than the server runs. sglang derives that number as it sizes its
    pools; this is a bound on it, from what the number is the least of: what the user asks for, the
    state slots that fit into the memory that is free now, and a constant.
    """
    schedule = get_schedule()
    tokens = _chunk_of_a_prompt() or schedule.max_prefill_tokens
    requests = _MOST_REQUESTS
    if schedule.max_running_requests is not None:
        requests = max(1, schedule.max_running_requests // get_parallel().attn_dp_size)
    # with --enable-mixed-chunk the step's decodes come on top of the requests that it admits
    if schedule.prefill_max_requests is not None and not schedule.enable_mixed_chunk:
        requests = min(requests, max(1, schedule.prefill_max_requests))
    slots_of_a_request = 1 if get_memory().disable_radix_cache else _SLOTS_OF_A_REQUEST
    requests = min(requests, _state_slots(runner, num_layers) // slots_of_a_request)
    return tokens, max(1, min(requests, tokens))


def _chunk_of_a_prompt() -> int | None:
    """``--chunked-prefill-size`` as sglang resolved it; ``None`` where prompts are not cut."""
    size = get_schedule().chunked_prefill_size
    return None if size is None or size < 1 else int(size)


def _state_slots(runner: Any, num_layers: int) -> int:
    """No fewer slots than sglang's pool of states will have on this rank."""
    schedule = get_schedule()
    asked: int | None = schedule.max_mamba_cache_size
    if asked is not None:
        ranks: int = get_parallel().attn_dp_size
        return asked // ranks
    params = mambaish_config(runner.model_config).mamba2_cache_params
    slot = params.mamba_cache_per_req * num_layers / len(params.layers)
    gc.collect()  # as sglang does before it measures
    free = get_available_gpu_memory(runner.device, runner.gpu_id)  # GiB
    free -= runner.pre_model_load_memory * (1 - schedule.mem_fraction_static)
    share = schedule.mamba_full_memory_ratio / (1 + schedule.mamba_full_memory_ratio)
    return int(max(0.0, free) * share * 2**30 / slot)


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
