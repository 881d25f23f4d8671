"""The decode step on Hopper in CUDA C++ (kernels/sm90/decode_step.cu), for K = V = 128."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from backend_core.launch.cuda import CudaKernel, CudaParams
from kda_backend.contract.step import is_aligned
from kda_backend.contract.values import ConvInputs, GateSpec, NormInputs, StateRef, TokenInputs
from kda_backend.launch_params import FusedStepSm90Params

if TYPE_CHECKING:
    from backend_core.tables.select import KernelPath

SOURCE = Path(__file__).parents[1] / "kernels" / "sm90" / "decode_step.cu"
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
    """One launch: a cluster of ``split`` CTAs of ``warps`` warps shares a head's state.

    The CTAs are placed while the kernel before runs, and wait for its end. With
    ``pdl_prefetch_safe`` they fetch slots, states, windows and weights before they wait.
    """
    check_alignment(state, conv)
    q, k, v, g, beta = tokens[:5]
    pool, indices = state.write, state.indices
    assert pool is not None and indices is not None
    conv_state, taps, conv_bias = conv or (None, None, None)
    norm_weight, norm_gate, eps = norm or (None, None, 0.0)
    optional = (gate.a_log, gate.dt_bias, conv_state, taps, conv_bias, norm_weight, norm_gate)
    launch: FusedStepSm90Params = path.params
    kernel = _kernel(
        launch,
        gate.kind,
        tokens.beta_kind,
        tokens.l2norm,
        pool.dtype,
        q.dtype,
        g.dtype,
        beta.dtype,
        *(None if tensor is None else tensor.dtype for tensor in optional),
    )
    rows, value_heads = v.shape[:2]
    params = PARAMS.pack(
        q=(q.data_ptr(), q.stride()[0]),
        k=(k.data_ptr(), k.stride()[0]),
        v=(v.data_ptr(), v.stride()[0]),
        g=(g.data_ptr(), g.stride()[0]),
        beta=(beta.data_ptr(), beta.stride()[0]),
        a_log=_address(gate.a_log),
        dt_bias=_address(gate.dt_bias),
        state=(pool.data_ptr(), pool.stride()[0]),
        indices=indices.data_ptr(),
        conv_state=(
            (0, 0, 0, 0) if conv_state is None else (conv_state.data_ptr(), *conv_state.stride())
        ),
        conv_weight=_address(taps),
        conv_bias=_address(conv_bias),
        norm_weight=_address(norm_weight),
        norm_gate=(0, 0) if norm_gate is None else (norm_gate.data_ptr(), norm_gate.stride()[0]),
        out=(out.data_ptr(), out.stride()[0]),
        heads=value_heads,
        heads_per_key=value_heads // q.shape[1],
        null_slot=state.null_slot,
        lower_bound=gate.lower_bound,
        scale=tokens.scale,
        eps=eps,
        pdl_prefetch_safe=pdl_prefetch_safe,
    )
    kernel(rows * value_heads * launch.split, 32 * launch.warps, params, pdl=True)


def defines(
    launch: FusedStepSm90Params,
    gate: int,
    beta: int,
    l2norm: bool,
    state: torch.dtype,
    x: torch.dtype,
    g: torch.dtype,
    beta_dtype: torch.dtype,
    *optional: torch.dtype | None,
) -> dict[str, int]:
    """Preprocessor constants of one variant.

    Args:
        optional: of A_log, dt_bias, the convolution's state, weight and bias, the norm's weight and
            gate; ``None`` is a tensor that is not there.
    """
    names = ("A", "DT", "CONV", "TAPS", "BIAS", "NORM", "Z")
    types = {"X": x, "G": g, "BETA": beta_dtype, **dict(zip(names, optional, strict=True))}
    return {
        "SPLIT": launch.split,
        "WARPS": launch.warps,
        "MIN_BLOCKS": CTAS_PER_SM[launch.warps],
        "LOAD_HINT": _HINTS[launch.load_hint],
        "STORE_HINT": _HINTS[launch.store_hint],
        "GATE": int(gate),
        "BETA": int(beta),
        "L2NORM": int(l2norm),
        "HAS_CONV": int(types["CONV"] is not None),
        "HAS_BIAS": int(types["BIAS"] is not None),
        "HAS_NORM": int(types["NORM"] is not None),
        "STATE_BF16": int(state == torch.bfloat16),
        **{f"DT_{name}": _TYPE[dtype or torch.float32] for name, dtype in types.items()},
    }


@functools.cache
def _kernel(*variant: Any) -> CudaKernel:
    return CudaKernel(SOURCE, "decode_step", PARAMS, defines(*variant))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
