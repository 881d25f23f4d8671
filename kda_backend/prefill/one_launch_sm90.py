"""Prefill of short sequences on Hopper in one launch (kernels/sm90/one_launch.cu).

It gives the bits of the two stages (`two_stage_sm90`), which run it for the steps that `serves`
allows: a CTA makes the tile of a chunk in shared memory and scans it there, and works on no rows
beyond the longest sequence's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.launch.cuda import CudaKernel, CudaParams
from backend_core.target import detect_target
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.launch_params import PrefillCostModel
from kda_backend.prefill.arguments_sm90 import (
    KERNELS,
    SEQUENCE_FIELDS,
    SNAPSHOT_POOL_FIELDS,
    STRUCTS,
    Layout,
    Track,
    Variant,
    address_of,
    beta_of,
    gate_parameter,
    pack_snapshot_pool,
    tile_defines,
)
from kda_backend.spec import CHUNK
from kda_backend.step_plan import StepPlan

if TYPE_CHECKING:
    from backend_core.tables.select import KernelPath

_FIELDS = (
    ("q", "Rows"),  # [T, H, 128] bf16, like k; g, v and o [T, HV, 128] bf16
    ("k", "Rows"),
    ("g", "Rows"),
    ("v", "Rows"),
    ("o", "Rows"),
    ("beta", "Rows"),  # [T, HV] bf16, or fp32 with BETA_FP32
    ("a_log", "const float*"),  # [HV] or null
    ("dt_bias", "const float*"),  # [HV, 128] or null
    *SEQUENCE_FIELDS,
    ("carry", "float*"),  # [CTAs with sequences of several chunks, 128, 128]
    ("scale", "float"),
    ("lower_bound", "float"),  # of a bounded gate
    ("num_snapshots", "int"),
    ("num_value_heads", "int"),
    ("heads_per_key", "int"),  # value heads per key head
    ("num_tasks", "int"),  # sequences times value heads, twice as many with split
    ("split", "int"),  # 1: a task is a half of the value rows
    ("prefetch_state", "int"),  # 1: states are asked for in the L2 cache while tiles are made
)
PARAMS = CudaParams(_FIELDS, STRUCTS)
POOL_PARAMS = CudaParams((*_FIELDS, *SNAPSHOT_POOL_FIELDS), STRUCTS)
"""Of the variants that write snapshots to a pool."""
_THREADS = 128
CTAS_PER_SM = {16: 3, 32: 3, 64: 2}
"""By rows of a chunk in shared memory. Where every task has an SM of its own, one."""
_SERIAL_TASKS_PER_SM = 2
"""Chunks of a sequence follow one another here: with fewer tasks the two stages are chosen."""


class Launch(NamedTuple):
    """How one call is launched.

    Attributes:
        rows: 16, 32 or 64, of a chunk in shared memory.
        ctas_per_sm: that registers leave room for.
        split: each half of the value rows has a CTA.
        ctas: each takes every ``ctas``-th task.
    """

    rows: int
    ctas_per_sm: int
    split: bool
    ctas: int


def serves(
    step_plan: StepPlan,
    state: StateRef,
    value_heads: int,
    cost_model: PrefillCostModel,
    sms: int,
) -> bool:
    """Whether a call is made in one launch: the host knows that its sequences are short, and the
    channels of its states lie in pairs."""
    longest = step_plan.max_tokens
    if longest is None or longest > cost_model.one_launch_max_tokens:
        return False
    tasks = step_plan.num_sequences * value_heads
    if longest > CHUNK and tasks < _SERIAL_TASKS_PER_SM * sms:
        return False
    return all(_has_pairs(state, x) for x in (state.read, state.write) if x is not None)


def _has_pairs(state: StateRef, tensor: torch.Tensor) -> bool:
    """Channels follow one another, and every row begins at a multiple of two of them."""
    row, head, v, k = state.strides(tensor)
    pair = 2 * tensor.element_size()
    return k == 1 and not (row | head | v) & 1 and tensor.data_ptr() % pair == 0


def choose_launch(longest: int, tasks: int, sms: int) -> Launch:
    """Args:
    longest: tokens of the longest sequence.
    tasks: sequences times value heads.
    """
    rows = next((rows for rows in CTAS_PER_SM if longest <= rows), CHUNK)
    split = 2 * tasks <= sms
    if split:
        tasks *= 2
    ctas_per_sm = 1 if tasks <= sms else CTAS_PER_SM[rows]
    return Launch(rows, ctas_per_sm, split, min(tasks, ctas_per_sm * sms))


def one_launch_sm90(
    kernels: Mapping[tuple[int, int], CudaKernel],
    launch: Launch,
    layout: Layout,
    tokens: TokenInputs,
    gate: GateSpec,
    step_plan: StepPlan,
    state: StateRef,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    carry: int,
    *,
    prefetch_state: bool = True,
) -> None:
    """Scores, solve and scan of all sequences, whose rows are on 16 bytes.

    Args:
        kernels: of `load_kernels`.
        carry: address of memory for the states between chunks, 64 KiB for each sequence and value
            head of several chunks.
    """
    _a_log, a_log = gate_parameter(gate.a_log)
    _dt_bias, dt_bias = gate_parameter(gate.dt_bias)
    beta = beta_of(tokens)
    plan = step_plan.addresses
    tasks = step_plan.num_sequences * layout.value_heads
    params = PARAMS.pack(
        q=(tokens.q.data_ptr(), *layout.q),
        k=(tokens.k.data_ptr(), *layout.k),
        g=(tokens.g.data_ptr(), *layout.g),
        v=(tokens.v.data_ptr(), *layout.v),
        o=(out.data_ptr(), *layout.o),
        beta=(beta.data_ptr(), *layout.beta),
        a_log=a_log,
        dt_bias=dt_bias,
        state_in=(address_of(state.read), *layout.state_in),
        state_out=(address_of(state.write), *layout.state_out),
        state_indices=address_of(state.indices),
        has_initial_state=address_of(state.has_initial),
        chunk_states=(address_of(chunk_states), *layout.chunk_states),
        snapshot_chunks=address_of(state.snapshot_chunks),
        snapshots=address_of(state.snapshots),
        cu_seqlens=plan.cu_seqlens,
        chunk_offsets=plan.offsets,
        sequence_order=plan.sequence_order,
        carry=carry,
        scale=tokens.scale,
        lower_bound=gate.lower_bound,
        num_snapshots=layout.num_snapshots,
        num_value_heads=layout.value_heads,
        heads_per_key=layout.heads_per_key,
        num_tasks=2 * tasks if launch.split else tasks,
        split=int(launch.split),
        prefetch_state=int(prefetch_state),
    )
    if state.snapshot_indices is not None:
        params += pack_snapshot_pool(state)
    kernels[launch.rows, launch.ctas_per_sm](launch.ctas, _THREADS, params)


@functools.cache
def load_kernels(
    path: KernelPath, device: torch.device, variant: Variant
) -> Mapping[tuple[int, int], CudaKernel]:
    """The kernels by rows and CTAs per SM, compiled and loaded."""
    longest = min(path.params.one_launch_max_tokens, CHUNK)
    kernels = {}
    for rows, many in CTAS_PER_SM.items():
        for ctas_per_sm in (1, many) if longest > rows // 2 or rows == 16 else ():
            made = CudaKernel(
                KERNELS / "one_launch.cu",
                "one_launch",
                params_of(variant),
                defines(rows, ctas_per_sm, variant),
            )
            made.load()
            kernels[rows, ctas_per_sm] = made
    return kernels


def params_of(variant: Variant) -> CudaParams:
    """The parameters of one variant of one_launch.cu."""
    return POOL_PARAMS if variant.track == Track.POOL else PARAMS


def defines(rows: int, ctas_per_sm: int, variant: Variant) -> dict[str, int]:
    """Preprocessor constants of one variant of one_launch.cu."""
    return {
        **tile_defines(variant),
        "ROWS": rows,
        "MIN_BLOCKS": ctas_per_sm,
        "CU_INT64": int(variant.int64_offsets),
        "STATE_BF16": int(variant.bf16_state),
        "TRACK": int(variant.track),
    }


def num_sms(device: torch.device) -> int:
    """SMs of a device."""
    return detect_target(device).num_sms
