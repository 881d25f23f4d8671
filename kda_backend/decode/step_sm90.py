"""The decode step on Hopper in CUDA C++ (kernels/sm90/decode_step.cu), for K = V = 128."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kda_backend.contract.step import is_aligned
from kda_backend.contract.values import ConvInputs, GateSpec, NormInputs, StateRef, TokenInputs
from kda_backend.launch_params import FusedStepSm90Params

if TYPE_CHECKING:
    from backend_core.launch.cuda import CudaKernel
    from backend_core.tables.select import KernelPath

SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "decode_step.cu"
DIM = 128
BLOCKS_A_SM = {4: 3, 8: 2, 16: 1}  # by warps of a block; a tile of 64 KiB allows three
_HINTS = {"": 0, "evict_first": 1, "evict_last": 2}
_PARAMS = struct.Struct("=15Q11q3i3fi4x")  # struct Params of the source
_TYPE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def check_alignment(state: StateRef, conv: ConvInputs | None) -> None:
    """Bulk copies need states on 16 bytes; so do the four taps of a channel.

    Raises:
        ValueError: the pool or the convolution's weight is not aligned.
    """
    if not is_aligned(state, conv):
        assert state.read is not None
        weight = "none" if conv is None else hex(conv.weight.data_ptr())
        raise ValueError(
            "state_pool's slots and conv_weight must start at multiples of 16 bytes for path"
            f" fused_sm90, got addresses {state.read.data_ptr():#x} and {weight}, and"
            f" {state.read.stride(0)} elements per slot: pass a selection made with"
            " KdaShape(..., aligned_state=False)"
        )


def step_sm90(
    path: KernelPath,
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: torch.Tensor,
    pdl_prefetch_safe: bool,
) -> None:
    """One launch; a cluster of ``split`` CTAs of ``warps`` warps shares a head's state.

    The CTAs are placed while the kernel before runs, and wait for it; with ``pdl_prefetch_safe``
    states are fetched before they wait.
    """
    check_alignment(state, conv)
    q, k, v, g, beta = tokens[:5]
    pool, indices = state.write, state.indices
    assert pool is not None and indices is not None
    conv_state, taps, conv_bias = conv or (None, None, None)
    norm_weight, norm_gate, eps = norm or (None, None, 0.0)
    launch: FusedStepSm90Params = path.params
    split = launch.split
    typed = (
        q,
        g,
        beta,
        gate.a_log,
        gate.dt_bias,
        conv_state,
        taps,
        conv_bias,
        norm_weight,
        norm_gate,
    )
    warps = launch.warps
    kernel = _kernel(
        split,
        warps,
        _HINTS[launch.load_hint],
        _HINTS[launch.store_hint],
        gate.kind,
        tokens.beta_kind,
        tokens.l2norm,
        pool.dtype == torch.bfloat16,
        *(None if tensor is None else tensor.dtype for tensor in typed),
    )
    rows, value_heads = v.shape[:2]
    params = _PARAMS.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        g.data_ptr(),
        beta.data_ptr(),
        _address(gate.a_log),
        _address(gate.dt_bias),
        pool.data_ptr(),
        indices.data_ptr(),
        _address(conv_state),
        _address(taps),
        _address(conv_bias),
        _address(norm_weight),
        _address(norm_gate),
        out.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        beta.stride(0),
        pool.stride(0),
        *((0, 0, 0) if conv_state is None else conv_state.stride()),
        0 if norm_gate is None else norm_gate.stride(0),
        out.stride(0),
        value_heads,
        value_heads // q.shape[1],
        state.null_slot,
        gate.lower_bound,
        tokens.scale,
        eps,
        pdl_prefetch_safe,
    )
    kernel(rows * value_heads * split, 32 * warps, params, overlaps=True)


def defines(
    split: int,
    warps: int,
    load_hint: int,
    store_hint: int,
    gate: int,
    beta: int,
    l2norm: bool,
    bf16_state: bool,
    x: torch.dtype,
    g: torch.dtype,
    beta_dtype: torch.dtype,
    a_log: torch.dtype | None,
    dt_bias: torch.dtype | None,
    conv: torch.dtype | None,
    taps: torch.dtype | None,
    conv_bias: torch.dtype | None,
    norm: torch.dtype | None,
    z: torch.dtype | None,
) -> dict[str, int]:
    """Preprocessor constants of one variant; a dtype of ``None`` is a tensor that is not there."""
    kinds = {
        "X": x,
        "G": g,
        "BETA": beta_dtype,
        "A": a_log,
        "DT": dt_bias,
        "CONV": conv,
        "TAPS": taps,
        "BIAS": conv_bias,
        "NORM": norm,
        "Z": z,
    }
    return {
        "SPLIT": split,
        "WARPS": warps,
        "MIN_BLOCKS": BLOCKS_A_SM[warps],
        "LOAD_HINT": load_hint,
        "STORE_HINT": store_hint,
        "GATE": gate,
        "BETA": beta,
        "L2NORM": int(l2norm),
        "HAS_CONV": int(conv is not None),
        "HAS_BIAS": int(conv_bias is not None),
        "HAS_NORM": int(norm is not None),
        "STATE_BF16": int(bf16_state),
        **{f"DT_{name}": _TYPE[dtype or torch.float32] for name, dtype in kinds.items()},
        "PARAM_BYTES": _PARAMS.size,
        "SHARED_BYTES": shared_bytes(split, warps, bf16_state),
    }


def shared_bytes(split: int, warps: int, bf16_state: bool) -> int:
    """sizeof(Shared): q, k and decay, a sum of each warp of a head, a barrier; the tile and its
    barriers where a warp has more than eight rows."""
    rows = DIM // split
    size = 4 * (3 * DIM + split * warps) + 8
    if rows // warps <= 8:
        return size
    return size + rows * DIM * (2 if bf16_state else 4) + 8 * rows // 8


@functools.cache
def _kernel(*variant: object) -> CudaKernel:
    from backend_core.launch.cuda import CudaKernel

    constants = defines(*variant)  # type: ignore[arg-type]
    return CudaKernel(SOURCE, "decode_step", constants, constants["SHARED_BYTES"])


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
