"""Prefill of short sequences on Hopper in one launch (kernels/sm90/one_launch.cu).

It gives the bits of the two stages (`two_stage_sm90`): a CTA makes the tile of a chunk in shared
memory and scans it there, and works on no rows beyond the longest sequence's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from backend_core.target import Target
from kda_backend.contract.calls import Addresses, PrefillCall, PreparedPrefill
from kda_backend.contract.values import GateSpec, StateRef
from kda_backend.prefill.arguments_sm90 import (
    KERNELS,
    SEQUENCE_ADDRESSES,
    SEQUENCE_FIELDS,
    SNAPSHOT_POOL_FIELDS,
    STRUCTS,
    HopperPath,
    PrefillVariant,
    Track,
    gate_parameter,
    snapshot_pool,
    tile_defines,
)
from kda_backend.scratch import Scratch
from kda_backend.spec import CHUNK
from kda_backend.token_spec import TYPE_CODES

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from kda_backend.selection import KdaShape

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
    ("scale", "float"),
    ("lower_bound", "float"),  # of a bounded gate
    ("num_snapshots", "int"),
    ("num_value_heads", "int"),
    ("heads_per_key", "int"),  # value heads per key head
    ("num_tasks", "int"),  # sequences times value heads, twice as many with split
    ("split", "int"),  # 1: a task is a half of the value rows
    ("prefetch_state", "int"),  # 1: states are asked for in the L2 cache while tiles are made
)
PARAMS = CudaParams(
    _FIELDS,
    STRUCTS,
    (*("q", "k", "g", "v", "o", "beta", "a_log", "dt_bias"), *SEQUENCE_ADDRESSES),
)
POOL_PARAMS = CudaParams((*_FIELDS, *SNAPSHOT_POOL_FIELDS), STRUCTS)
"""Parameters of the variants that write snapshots to a pool."""
_THREADS = 128
CTAS_PER_SM = {16: 3, 32: 3, 64: 2}
"""CTAs per SM, by rows per chunk; 1 if there are no more tasks than SMs."""


Kernels: TypeAlias = Mapping[tuple[int, int], CudaKernel]
"""Kernels of a variant, by rows and CTAs per SM."""


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


def bind(row: Row, spec: KdaShape, target: Target) -> OneLaunchSm90:
    """Raises:
    ValueError: the row is for sequences of more than one chunk.
    """
    if row.max_longest is None or row.max_longest > CHUNK:
        raise ValueError(
            f"expected max_longest of at most {CHUNK} for one_launch_sm90, got {row.max_longest}"
        )
    return OneLaunchSm90(target)


class OneLaunchSm90(HopperPath):
    """Scores, solve and scan of all sequences, whose lengths the host knows."""

    def __init__(self, target: Target) -> None:
        self._sms = target.num_sms
        self._made: dict[PrefillVariant, Kernels] = {}

    def begin_to_compile(self, variant: PrefillVariant) -> list[CudaKernel]:
        if variant not in self._made:
            self._made[variant] = _make_kernels(variant)
        return list(self._made[variant].values())

    def kernels(self, variant: PrefillVariant) -> Kernels:
        for kernel in self.begin_to_compile(variant):
            kernel.load()
        return self._made[variant]

    def prepare(self, call: PrefillCall) -> PreparedPrefill | None:
        strides, _, kernels = self.layout_of(call)
        return None if strides is None else _launch_of(kernels, self._sms, strides, call)


def _launch_of(
    kernels: Kernels, sms: int, strides: Mapping[str, tuple[int, ...]], call: PrefillCall
) -> PreparedPrefill:
    tokens, gate, step_plan, state, *_ = call
    value_heads = tokens.v.shape[2]
    assert step_plan.max_tokens is not None  # the row has a limit of the longest sequence
    tasks = step_plan.num_sequences * value_heads
    chosen = choose_launch(step_plan.max_tokens, tasks, sms)
    kernel = kernels[chosen.rows, chosen.ctas_per_sm]
    table = step_plan.chunk_table
    assert table is not None
    params = PARAMS.at(
        strides,
        cu_seqlens=step_plan.cu_seqlens.data_ptr(),
        chunk_offsets=table.offsets.data_ptr(),
        sequence_order=table.sequence_order.data_ptr(),
        scale=tokens.scale,
        lower_bound=gate.lower_bound,
        num_snapshots=state.num_snapshots,
        num_value_heads=value_heads,
        heads_per_key=value_heads // tokens.q.shape[2],
        num_tasks=2 * tasks if chosen.split else tasks,
        split=int(chosen.split),
        prefetch_state=1,
    )

    in_pool = snapshot_pool(state)

    def launch(
        rows: Addresses, gate: GateSpec, states: Addresses, scratch: Scratch, qk_conv: Addresses
    ) -> None:
        q, k, v, g, beta, o = rows
        _a_log, a_log = gate_parameter(gate.a_log)
        _dt_bias, dt_bias = gate_parameter(gate.dt_bias)
        *sequences, slots = states
        filled = params(q, k, g, v, o, beta, a_log, dt_bias, *sequences)
        kernel(chosen.ctas, _THREADS, filled + in_pool(slots))

    return launch


def has_pairs(state: StateRef) -> bool:
    """Whether channels of the states follow one another, and every row begins at a multiple of two
    of them, as the kernel reads them."""
    for tensor in (state.read, state.write):
        if tensor is None:
            continue
        row, head, v, k = state.strides(tensor)
        pair = 2 * tensor.element_size()
        if k != 1 or (row | head | v) & 1 or tensor.data_ptr() % pair:
            return False
    return True


@functools.lru_cache(4096)
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


def _make_kernels(variant: PrefillVariant) -> Kernels:
    return {
        (rows, ctas_per_sm): CudaKernel(
            KERNELS / "one_launch.cu",
            "one_launch",
            params_of(variant),
            defines(rows, ctas_per_sm, variant),
        )
        for rows, many in CTAS_PER_SM.items()
        for ctas_per_sm in (1, many)
    }


def params_of(variant: PrefillVariant) -> CudaParams:
    """The parameters of one variant of one_launch.cu."""
    return POOL_PARAMS if variant.track == Track.POOL else PARAMS


def defines(rows: int, ctas_per_sm: int, variant: PrefillVariant) -> dict[str, int]:
    """Preprocessor constants of one variant of one_launch.cu."""
    return {
        **tile_defines(variant),
        "ROWS": rows,
        "MIN_BLOCKS": ctas_per_sm,
        "CU_INT64": int(variant.int64_offsets),
        "DT_STATE": TYPE_CODES[variant.state_dtype],
        "TRACK": int(variant.track),
    }
