"""The decode step on Hopper in CUDA C++ (kernels/sm90/decode_step.cu), for K = V = 128."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from kda_backend.contract.calls import DecodeCall
from kda_backend.contract.step import is_aligned
from kda_backend.contract.values import ConvInputs, StateRef
from kda_backend.launch_params import FusedStepSm90Params
from kda_backend.token_spec import TYPE_CODES

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape

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
    (
        *("q", "k", "v", "g", "beta", "a_log", "dt_bias", "state", "indices", "conv_state"),
        *("conv_weight", "conv_bias", "norm_weight", "norm_gate", "out"),
    ),
)


def bind(row: Row, spec: KdaShape, target: Target) -> FusedStepSm90:
    return FusedStepSm90(row.params)


class HopperStep:
    """A step of one launch, whose parameters begin with the addresses of its tensors.

    Attributes:
        source: of the kernel, which has its name; params: as the kernel takes them.
        state_at, taps_at: the places of the pool and of the convolution's weight among the tensors.
    """

    source: Path
    params: CudaParams
    state_at: int
    taps_at: int

    def __init__(self) -> None:
        self._kernels: dict[tuple[tuple[str, int], ...], CudaKernel] = {}

    def prepare(self, call: Any) -> Callable[[Any], None]:
        """Raises ValueError, as its result does, where the pool or the convolution's weight is not
        aligned."""
        if not is_aligned(call.state, call.conv):
            raise misaligned(call.state, call.conv)
        launch, tensors_of = self._launch_of(call), self._tensors_of
        state_at, taps_at = self.state_at, self.taps_at

        def run(call: Any) -> None:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors_of(call)]
            # the slot stride is that of all such calls
            if (addresses[state_at] | addresses[taps_at]) & 15:
                raise misaligned(call.state, call.conv)
            launch(addresses)

        return run

    def kernel(self, defines: dict[str, int]) -> CudaKernel:
        """The kernel of these preprocessor constants."""
        key = tuple(defines.items())
        if key not in self._kernels:
            self._kernels[key] = CudaKernel(self.source, self.source.stem, self.params, defines)
        return self._kernels[key]

    def _tensors_of(self, call: Any) -> tuple[torch.Tensor | None, ...]:
        """In the order of the parameters."""
        raise NotImplementedError

    def _launch_of(self, call: Any) -> Callable[[list[int]], None]:
        """The launch of calls alike, of the addresses that the parameters begin with."""
        raise NotImplementedError


class FusedStepSm90(HopperStep):
    """One launch: a cluster of ``split`` CTAs of ``warps`` warps shares a head's state.

    The CTAs are placed while the kernel before runs, and wait for its end. With
    ``pdl_prefetch_safe`` they fetch slots, states, windows and weights before they wait.
    """

    source, params, state_at, taps_at = SOURCE, PARAMS, 7, 10

    def __init__(self, params: FusedStepSm90Params) -> None:
        super().__init__()
        self._params = params

    def _tensors_of(self, call: DecodeCall) -> tuple[torch.Tensor | None, ...]:
        tokens, gate, state, conv, norm, out, _ = call
        return (
            *(*tokens[:5], gate.a_log, gate.dt_bias, state.write, state.indices),
            *(*(conv or (None, None, None)), *(norm or (None, None))[:2], out),
        )

    def _launch_of(self, call: DecodeCall) -> Callable[[list[int]], None]:
        tokens, gate, state, conv, norm, out, pdl_prefetch_safe = call
        q, k, v, g, beta = tokens[:5]
        pool = state.write
        assert pool is not None
        conv_state, taps, conv_bias = conv or (None, None, None)
        norm_weight, norm_gate, eps = norm or (None, None, 0.0)
        optional = (gate.a_log, gate.dt_bias, conv_state, taps, conv_bias, norm_weight, norm_gate)
        of_dtypes = [None if tensor is None else tensor.dtype for tensor in optional]
        options = (self._params, gate.kind, tokens.beta_kind, tokens.l2norm)
        kernel = self.kernel(
            defines(*options, pool.dtype, q.dtype, g.dtype, beta.dtype, *of_dtypes)
        )
        rows = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": pool, "out": out}
        strides = {name: x.stride()[:1] for name, x in rows.items()}
        strides["conv_state"] = (0, 0, 0) if conv_state is None else conv_state.stride()
        strides["norm_gate"] = (0,) if norm_gate is None else norm_gate.stride()[:1]
        number, value_heads = v.shape[:2]
        params = PARAMS.at(
            strides,
            heads=value_heads,
            heads_per_key=value_heads // q.shape[1],
            null_slot=state.null_slot,
            lower_bound=gate.lower_bound,
            scale=tokens.scale,
            eps=eps,
            pdl_prefetch_safe=pdl_prefetch_safe,
        )
        ctas = number * value_heads * self._params.split
        threads = 32 * self._params.warps
        return lambda addresses: kernel(ctas, threads, params(*addresses), pdl=True)


def misaligned(state: StateRef, conv: ConvInputs | None) -> ValueError:
    """Bulk copies need states on 16 bytes; so do the four taps of a channel."""
    assert state.write is not None
    weight = "none" if conv is None else hex(conv.weight.data_ptr())
    return ValueError(
        "state_pool's slots and conv_weight must start at multiples of 16 bytes for path"
        f" fused_sm90, got addresses {state.write.data_ptr():#x} and {weight}, and"
        f" {state.write.stride(0)} elements per slot: pass a selection made with"
        " KdaShape(..., aligned_state=False)"
    )


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
    types: dict[str, torch.dtype | None] = {"STATE": state, "X": x, "G": g, "BETA": beta_dtype}
    types |= dict(zip(names, optional, strict=True))
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
        **{f"DT_{name}": TYPE_CODES[dtype or torch.float32] for name, dtype in types.items()},
    }
