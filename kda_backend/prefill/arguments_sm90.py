"""How the Hopper prefill kernels get their arguments: structs, addresses and strides."""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from backend_core.ready import Prepared
from kda_backend.contract.calls import PrefillCall, PreparedPrefill
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.spec import Beta, Gate
from kda_backend.step_plan import StepPlan

TILE_BYTES = 7 * 8192  # -k_in, q_in, T^T k_out, A_qk T in 8 KiB blocks
KERNELS = Path(__file__).parents[1] / "kernels" / "sm90"
DIM = 128

STRUCTS = {
    "Rows": (("ptr", "void*"), ("stride_t", "i64"), ("stride_h", "i64")),
    "States": (("ptr", "void*"), *((f"stride_{axis}", "i64") for axis in "nhvk")),
}

INTRA_FIELDS = (
    ("q", "Rows"),  # [T, H, 128] bf16, like k; g [T, HV, 128] bf16
    ("k", "Rows"),
    ("g", "Rows"),
    ("beta", "Rows"),  # [T, HV] bf16, or fp32 with BETA_FP32
    ("a_log", "const float*"),  # [HV] or null
    ("dt_bias", "const float*"),  # [HV, 128] or null
    ("tiles", "u16*"),  # [chunks, HV, 7 * 4096] fp16: -k_in, q_in, T^T k_out, A_qk T
    ("chunk_decays", "float*"),  # [chunks, HV, 128], in the order in which the scan reads them
    ("chunk_start", "const int*"),  # [chunks]: first token
    ("chunk_len", "const int*"),  # [chunks]: tokens, 0 after the last chunk
    ("chunk_order", "const int*"),  # [chunks]: chunks in the order in which they are made
    ("num_value_heads", "int"),
    ("heads_per_key", "int"),  # value heads per key head
    ("lower_bound", "float"),  # of a bounded gate
    ("num_tiles", "int"),  # a tile's number is chunk * HV + value head
    ("first_scan_sm", "int"),  # SMs from this number on are reserved for the scan
    ("reserved_sm_tile_cap", "int"),  # tiles that a CTA on one of them makes before it ends
    ("progress", "Progress*"),
    ("fault", "Fault*"),  # in host memory
)
"""Fields of the intra-chunk kernel."""

SEQUENCE_FIELDS = (
    ("state_in", "States"),  # [slots, HV, V, K], or null
    ("state_out", "States"),
    ("state_indices", "const int*"),  # [N]: slots, or null: sequence n has slot n
    ("has_initial_state", "const unsigned char*"),  # [N], or null: all have
    ("chunk_states", "States"),  # [chunks, HV, V, K] bf16: before each chunk, or null
    ("snapshot_chunks", "const int*"),  # [N, num_snapshots]: after how many chunks
    ("snapshots", "void*"),  # [N, num_snapshots, HV, 128, 128] fp32, or a pool as state_out
    ("cu_seqlens", "const void*"),  # [N + 1] int32, or int64 with CU_INT64
    ("chunk_offsets", "const int*"),  # [N + 1]: first chunk
    ("sequence_order", "const int*"),  # [N]: most chunks first
)
"""Fields of both kernels that scan: where states are and which tokens a sequence has."""
SEQUENCE_ADDRESSES = tuple(name for name, _ in SEQUENCE_FIELDS[:7])
"""Names that differ from layer to layer of a step, as `state_addresses` gives them first."""

SNAPSHOT_POOL_FIELDS = (
    ("snapshot_indices", "const int*"),  # [N, num_snapshots]: slots, negative for none
    ("snapshot_stride", "i64"),  # elements from slot to slot
)
"""After all others of these kernels, in the variants that write snapshots to a pool."""
_SNAPSHOT_POOL_PARAMS = CudaParams(SNAPSHOT_POOL_FIELDS, addresses=["snapshot_indices"])

Strides: TypeAlias = "dict[str, tuple[int, ...]]"


class HopperPath:
    """A path of the prefill on Hopper, bound to a row and a GPU. It has the kernels of each
    `PrefillVariant` that its calls had."""

    def begin_to_compile(self, variant: PrefillVariant) -> list[CudaKernel]:
        """Every kernel that a call may choose, compiled in threads."""
        raise NotImplementedError

    def kernels(self, variant: PrefillVariant) -> Any:
        """All of a variant, loaded: a later batch may be the first to choose one."""
        raise NotImplementedError

    def layout_of(self, call: PrefillCall) -> tuple[Strides | None, PrefillVariant, Any]:
        """Strides (token, head) of rows and (row, head, V, K) of states, by the names of the
        kernels' parameters, zeros where there is none; or ``None`` where q, k, v, g or the output
        have rows off multiples of 16 bytes, or beta is in fp16. And the variant with its kernels.
        Calls alike keep them."""
        (q, k, v, g, beta, *_), gate, step_plan, state, out, chunk_states, _, kept, _ = call
        what = self, step_plan.cu_seqlens.dtype, chunk_states is None
        if what not in kept:
            strides = None
            rows = [x.stride()[1:3] for x in (q, k, v, g, out)]
            on_16_bytes = functools.reduce(operator.or_, itertools.chain(*rows)) % 8 == 0
            if on_16_bytes and beta.dtype != torch.float16:
                strides = dict(zip("qkvgo", rows, strict=True))
                strides["beta"] = beta.stride()[1:]
                states = (("in", state.read), ("out", state.write))
                strides |= {f"state_{name}": state.strides(x) for name, x in states}
                strides["chunk_states"] = state.strides(chunk_states)
            variant = variant_of(call.tokens, gate, step_plan, state, chunk_states)
            kept[what] = strides, variant, self.kernels(variant)
        found: tuple[Strides | None, PrefillVariant, Any] = kept[what]
        return found

    def prepare(self, call: PrefillCall) -> PreparedPrefill | None:
        """Pack the launches of a plan's calls that are laid out as this one; ``None`` where tensors
        have to be copied first."""
        raise NotImplementedError

    def __call__(self, call: PrefillCall) -> None:
        """Run a call that is not prepared, of packed copies on 16 bytes, beta in bf16 or fp32."""
        tokens, gate, _, state, out, chunk_states, scratch, *_ = call
        beta = tokens.beta.to(_beta_dtype(tokens))
        rows = TokenInputs._make((*map(_on_16_bytes, tokens[:4]), beta, *tokens[5:]))
        packed = _on_16_bytes(out)
        copied = call._replace(tokens=rows, out=packed, layout=Prepared(), stages=None)
        launch = self.prepare(copied)
        assert launch is not None
        at = [x.data_ptr() for x in (*rows[:5], packed)]
        launch(at, gate, state_addresses(state, chunk_states), scratch, ())
        if packed is not out:
            out.copy_(packed)


class Track(enum.IntEnum):
    """The states inside of the sequences that a variant writes: the definition TRACK of kernels."""

    __hash__ = int.__hash__  # as `Gate`'s

    NONE = 0
    IN_ORDER = 1  # those of chunks, and snapshots one after another
    POOL = 2  # those of chunks, and snapshots to slots of a pool


class PrefillVariant(NamedTuple):
    """The properties of a call that a kernel is compiled for.

    Attributes:
        beta_dtype: of beta as the kernels read it, bf16 or fp32.
        int64_offsets: cu_seqlens are int64.
        state_dtype: of the states in memory.
        track: states inside of the sequences that are written too.
    """

    gate: int
    beta: int
    l2norm: bool
    beta_dtype: torch.dtype
    int64_offsets: bool
    state_dtype: torch.dtype
    track: Track


def tile_defines(variant: PrefillVariant) -> dict[str, int]:
    """Preprocessor constants of the kernels that make tiles."""
    return {
        "GATE": variant.gate,
        "BETA": variant.beta,
        "L2NORM": int(variant.l2norm),
        "BETA_FP32": int(variant.beta_dtype == torch.float32),
    }


def intra_defines(variant: PrefillVariant, ctas_per_sm: int) -> dict[str, int]:
    """Preprocessor constants of one variant of intra_chunk.cu."""
    return tile_defines(variant) | {"MIN_BLOCKS": ctas_per_sm}


def _beta_dtype(tokens: TokenInputs) -> torch.dtype:
    """That of beta as the kernels read it."""
    return torch.float32 if tokens.beta.dtype == torch.float16 else tokens.beta.dtype


def variant_of(
    tokens: TokenInputs,
    gate: GateSpec,
    step_plan: StepPlan,
    state: StateRef,
    chunk_states: torch.Tensor | None,
) -> PrefillVariant:
    """The kernels' variants for a call."""
    return PrefillVariant(
        gate=gate.kind,
        beta=tokens.beta_kind,
        l2norm=tokens.l2norm,
        beta_dtype=_beta_dtype(tokens),
        int64_offsets=step_plan.cu_seqlens.dtype == torch.int64,
        state_dtype=state.dtype,
        track=_track_of(state, chunk_states),
    )


def variant_of_engine(
    bounded_gate: bool, state_dtype: torch.dtype, *, track: Track, beta: Beta = Beta.SIGMOID
) -> PrefillVariant:
    """The kernels' variant for an engine's prefills of bf16, whose offsets are int32.

    Args:
        state_dtype: of the pool.
        beta: logits in bf16, or step sizes in fp32 (``Beta.GIVEN``).
    """
    return PrefillVariant(
        gate=Gate.BOUNDED if bounded_gate else Gate.SOFTPLUS,
        beta=beta,
        l2norm=True,
        beta_dtype=torch.float32 if beta == Beta.GIVEN else torch.bfloat16,
        int64_offsets=False,
        state_dtype=state_dtype,
        track=track,
    )


def _track_of(state: StateRef, chunk_states: torch.Tensor | None) -> Track:
    if state.snapshot_indices is not None:
        return Track.POOL
    asked = chunk_states is not None or state.snapshots is not None
    return Track.IN_ORDER if asked else Track.NONE


def snapshot_pool(state: StateRef) -> Callable[..., bytes]:
    """A function of the slots' address: the parameters that follow those of a kernel that writes no
    snapshots to a pool; nothing where there is none."""
    if state.snapshot_stride is None:
        return lambda _: b""
    return _SNAPSHOT_POOL_PARAMS.at({}, snapshot_stride=state.snapshot_stride)


def _on_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """x, or a packed copy where its rows ``[B, T, heads, 128]`` are not on 16 bytes, as vector
    loads and stores need them."""
    _, stride_t, stride_h, _ = x.stride()
    if (x.data_ptr() | 2 * stride_t | 2 * stride_h) & 15:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def gate_parameter(x: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """In fp32, on 16 bytes; and its address, 0 for none."""
    if x is None:
        return None, 0
    address = x.data_ptr()
    if x.dtype != torch.float32 or address & 15:
        x = x.float() if x.dtype != torch.float32 else x.clone()
        address = x.data_ptr()
    return x, address


def state_addresses(state: StateRef, chunk_states: torch.Tensor | None) -> list[int]:
    """Addresses of `SEQUENCE_ADDRESSES` and of the snapshots' slots, 0 for none."""
    read, write, _, indices, has_initial, chunks, snapshots, slots, _, _ = state
    tensors = (read, write, indices, has_initial, chunk_states, chunks, snapshots, slots)
    return [0 if x is None else x.data_ptr() for x in tensors]
