"""The decode step on Hopper in CUDA C++ (kernels/sm90/decode_step.cu), for K = V = 128."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend_core.launch.cuda import CudaKernel, CudaParams
from kda_backend.contract.step import StepInputs, is_aligned
from kda_backend.launch_params import FusedStepSm90Params

if TYPE_CHECKING:
    from backend_core.tables.select import KernelPath

SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "decode_step.cu"
DIM = 128
CTAS_PER_SM = {4: 3, 8: 2, 16: 1}  # by warps of a CTA; a tile of 64 KiB allows three
_HINTS = {"": 0, "evict_first": 1, "evict_last": 2}
PARAMS = CudaParams(
    (
        ("q", "Rows"),  # [N, H, 128], like k
        ("k", "Rows"),
        ("v", "Rows"),  # [N, HV, 128], like g
        ("g", "Rows"),
        ("beta", "Rows"),  # [N, HV]
        ("a_log", "const void*"),  # [HV], or null
        ("dt_bias", "const void*"),  # [HV, 128], or null
        ("state", "Rows"),  # [slots, HV, 128, 128]
        ("indices", "const int*"),  # [N]: slots
        ("conv_state", "Windows"),  # [slots, C, W]
        ("conv_weight", "const void*"),  # [C, 4]
        ("conv_bias", "const void*"),  # [C]
        ("norm_weight", "const void*"),  # [128]
        ("norm_gate", "Rows"),  # [N, HV, 128], like out
        ("out", "Rows"),
        ("heads", "int"),  # value heads
        ("heads_per_key", "int"),
        ("null_slot", "int"),  # rows at it, as those at negative slots, are padding
        ("lower_bound", "float"),
        ("scale", "float"),
        ("eps", "float"),
        ("pdl_prefetch_safe", "int"),  # no kernel in flight writes pools, indices or weights
    ),
    {
        "Rows": (("ptr", "void*"), ("stride", "i64")),
        "Windows": (("ptr", "void*"), *((f"stride_{axis}", "i64") for axis in "ncw")),
    },
)
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
    """One launch: a cluster of ``split`` CTAs of ``warps`` warps shares a head's state.

    The CTAs are placed while the kernel before runs, and wait for its end. With
    ``pdl_prefetch_safe`` they fetch slots, states, windows and weights before they wait.
    """
    check_alignment(x)
    conv, norm = x.conv, x.norm
    conv_state, taps, conv_bias = (conv.state, conv.weight, conv.bias) if conv else (None,) * 3
    norm_weight, norm_gate = (norm.weight, norm.gate) if norm else (None, None)
    launch: FusedStepSm90Params = path.params
    split = launch.split
    typed = (x.q, x.g, x.beta, x.a_log, x.dt_bias, conv_state, taps, conv_bias, norm_weight, norm_gate)
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
    params = PARAMS.pack(
        q=(x.q.data_ptr(), x.q.stride(0)),
        k=(x.k.data_ptr(), x.k.stride(0)),
        v=(x.v.data_ptr(), x.v.stride(0)),
        g=(x.g.data_ptr(), x.g.stride(0)),
        beta=(x.beta.data_ptr(), x.beta.stride(0)),
        a_log=_address(x.a_log),
        dt_bias=_address(x.dt_bias),
        state=(x.pool.data_ptr(), x.pool.stride(0)),
        indices=x.indices.data_ptr(),
        conv_state=(conv_state.data_ptr(), *conv_state.stride()) if conv else (0, 0, 0, 0),
        conv_weight=_address(taps),
        conv_bias=_address(conv_bias),
        norm_weight=_address(norm_weight),
        norm_gate=(norm_gate.data_ptr(), norm_gate.stride(0)) if norm else (0, 0),
        out=(out.data_ptr(), out.stride(0)),
        heads=value_heads,
        heads_per_key=value_heads // x.q.shape[1],
        null_slot=x.null_slot,
        lower_bound=x.lower_bound,
        scale=x.scale,
        eps=norm.eps if norm else 0.0,
        pdl_prefetch_safe=x.settled,
    )
    kernel(rows * value_heads * split, 32 * warps, params, pdl=True)


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
        "MIN_BLOCKS": CTAS_PER_SM[warps],
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
    }


@functools.cache
def _kernel(*variant: object) -> CudaKernel:
    return CudaKernel(SOURCE, "decode_step", PARAMS, defines(*variant))  # type: ignore[arg-type]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
