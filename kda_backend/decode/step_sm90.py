"""The decode step on Hopper in CUDA C++ (kernels/sm90/decode_step.cu), for K = V = 128."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kda_backend.contract.step import StepInputs, is_aligned
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


def check_alignment(x: StepInputs) -> None:
    """Bulk copies need states on 16 bytes; so do the four taps of a channel.

    Raises:
        ValueError: the pool or the convolution's weight is not aligned.
    """
    if not is_aligned(x):
        weight = "none" if x.conv is None else hex(x.conv.weight.data_ptr())
        raise ValueError(
            "state_pool's slots and conv_weight must start at multiples of 16 bytes for path"
            f" fused_sm90, got addresses {x.pool.data_ptr():#x} and {weight}, and"
            f" {x.pool.stride(0)} elements per slot; select paths for aligned_state=False"
        )


def step_sm90(path: KernelPath, x: StepInputs, out: torch.Tensor) -> None:
    """One launch; ``step_split`` blocks of ``step_warps`` warps, a cluster, share a head's state.

    The blocks are placed while the kernel before runs, and wait for it; what it does not write is
    fetched before they wait.
    """
    check_alignment(x)
    conv, norm = x.conv, x.norm
    conv_state, taps, conv_bias = (conv.state, conv.weight, conv.bias) if conv else (None,) * 3
    norm_weight, gate = (norm.weight, norm.gate) if norm else (None, None)
    launch: FusedStepSm90Params = path.params
    split = launch.split
    typed = (x.q, x.g, x.beta, x.a_log, x.dt_bias, conv_state, taps, conv_bias, norm_weight, gate)
    warps = launch.warps
    kernel = _kernel(
        split,
        warps,
        _HINTS[launch.load_hint],
        _HINTS[launch.store_hint],
        x.gate,
        x.beta_kind,
        x.l2norm,
        x.pool.dtype == torch.bfloat16,
        *(None if tensor is None else tensor.dtype for tensor in typed),
    )
    rows, value_heads = x.v.shape[:2]
    params = _PARAMS.pack(
        x.q.data_ptr(),
        x.k.data_ptr(),
        x.v.data_ptr(),
        x.g.data_ptr(),
        x.beta.data_ptr(),
        _address(x.a_log),
        _address(x.dt_bias),
        x.pool.data_ptr(),
        x.indices.data_ptr(),
        _address(conv_state),
        _address(taps),
        _address(conv_bias),
        _address(norm_weight),
        _address(gate),
        out.data_ptr(),
        x.q.stride(0),
        x.k.stride(0),
        x.v.stride(0),
        x.g.stride(0),
        x.beta.stride(0),
        x.pool.stride(0),
        *((0, 0, 0) if conv_state is None else conv_state.stride()),
        0 if gate is None else gate.stride(0),
        out.stride(0),
        value_heads,
        value_heads // x.q.shape[1],
        x.null_slot,
        x.lower_bound,
        x.scale,
        norm.eps if norm else 0.0,
        x.settled,
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
