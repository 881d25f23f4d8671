"""Peers of the decode benchmark: FLA, vLLM's Triton path, sglang's packed decode and FlashInfer's.

Each is the launches that its engine makes for a decode step of a Kimi-Linear layer between the
projections and the output projection: convolution update, recurrence, gated norm. vLLM's and
sglang's kernels are read from an unpacked wheel, without the rest of the engine; its helper
functions are stood in for here. Where a kernel can be launched with programmatic dependent launch,
it is, as the engine does on Hopper.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from benchmarks.peers.sources import packages, stub

DIM = 128
EPS = 1e-5


@dataclass
class Layer:
    """A decode step's tensors for ``calls`` steps that meet no state twice.

    Attributes:
        qkv: ``[N, 3 H 128]`` bf16; g, z: ``[N, H, 128]`` bf16; beta: ``[N, H]`` bf16.
        states: ``[calls * N + 1, H, 128, 128]``; windows: ``[calls * N + 1, 3, C]`` bf16.
            Slot 0 is left out, since vLLM means padding by it.
        indices: ``[calls, N]`` int32.
    """

    qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    z: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    conv_weight: torch.Tensor
    norm_weight: torch.Tensor
    states: torch.Tensor
    windows: torch.Tensor
    indices: torch.Tensor

    @property
    def heads(self) -> int:
        return self.g.shape[1]


Step = Callable[[int], torch.Tensor]
"""Runs call i and returns the output [N, H, 128]."""
Peer = Callable[[Layer], Step]


def load_fla() -> Peer | None:
    """FLA as installed; it has no pools: convolution caches and states are dense, a copy a call."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d_update
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.kda import fused_recurrent_kda
    except ImportError as error:
        print(f"FLA is left out: {error}", flush=True)
        return None

    def make(x: Layer) -> Step:
        calls, rows = x.indices.shape
        keys = x.heads * DIM
        slots = x.indices.flatten().long()
        states = x.states[slots].unflatten(0, (calls, rows))
        # FLA keeps as many inputs as taps, the oldest of which no later step needs
        caches = torch.nn.functional.pad(x.windows[slots].transpose(1, 2), (1, 0)).contiguous()
        caches = caches.unflatten(0, (calls, rows))
        weight = x.conv_weight.bfloat16()

        def step(i: int) -> torch.Tensor:
            with torch.inference_mode():
                mixed, _ = causal_conv1d_update(
                    x.qkv[:, None], caches[i], weight=weight, activation="silu"
                )
                q, k, v = (
                    y.unflatten(2, (x.heads, DIM)) for y in mixed.split([keys, keys, keys], 2)
                )
                o, _ = fused_recurrent_kda(
                    q,
                    k,
                    v,
                    x.g[:, None],
                    x.beta[:, None],
                    A_log=x.a_log,
                    dt_bias=x.dt_bias,
                    initial_state=states[i],
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                    use_gate_in_kernel=True,
                    use_beta_sigmoid_in_kernel=True,
                    state_v_first=True,
                )
                o = rms_norm_gated(
                    o, x.z[:, None], x.norm_weight, None, activation="sigmoid", eps=EPS
                )
                return o[:, 0]

        return step

    return make


def load_vllm(source: Path) -> Peer | None:
    """vLLM 0.33's kernels of ``KimiGatedDeltaNetAttention`` on CUDA, without its two copies."""
    root = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
    packages(source, root, "vllm.third_party.flash_linear_attention.ops", "vllm.utils")
    packages(source, "vllm.model_executor.layers.mamba.ops")
    platform = types.SimpleNamespace(
        is_arch_support_pdl=_has_pdl,
        is_rocm=lambda: torch.version.hip is not None,
        is_cuda=lambda: torch.version.hip is None,
        is_cuda_alike=lambda: True,
        is_xpu=lambda: False,
        is_cpu=lambda: False,
        device_type="cuda",
        get_device_name=lambda *_: "",
    )
    from triton.language.extra import libdevice

    stub("vllm.platforms", current_platform=platform)
    stub("vllm.triton_utils", tl=tl, triton=triton, tldevice=libdevice)
    stub("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0, PAD_SLOT_ID=-1)
    stub("vllm.model_executor.custom_op", CustomOp=_CustomOp)
    stub("vllm.utils.torch_utils", async_tensor_h2d=None)
    stub("vllm.utils.math_utils", cdiv=triton.cdiv, next_power_of_2=triton.next_power_of_2,
          RCP_LN2=1.4426950408889634)  # fmt: skip
    try:
        conv = importlib.import_module("vllm.model_executor.layers.mamba.ops.causal_conv1d")
        recurrent = importlib.import_module(f"{root}.fused_recurrent")
        norm = importlib.import_module("vllm.third_party.flash_linear_attention.ops.kda")
    except ImportError as error:
        print(f"vLLM's kernels are left out: {error}", flush=True)
        return None

    def make(x: Layer) -> Step:
        windows = x.windows.transpose(1, 2)

        def step(i: int) -> torch.Tensor:
            mixed = conv.causal_conv1d_update(
                x.qkv,
                windows,
                x.conv_weight,
                None,
                activation="silu",
                conv_state_indices=x.indices[i],
                out=torch.empty_like(x.qkv),
            )
            o, _ = recurrent.fused_recurrent_kda_packed_decode(
                mixed_qkv=mixed,
                raw_g=x.g[None],
                raw_beta=x.beta[None],
                A_log=x.a_log,
                dt_bias=x.dt_bias.flatten(),
                lower_bound=None,
                initial_state=x.states,
                state_indices=x.indices[i],
            )
            return norm.rms_norm_gated(o[0], x.z, x.norm_weight, None, "sigmoid", eps=EPS)

        return step

    return make


def load_sglang(source: Path) -> Peer | None:
    """sglang 0.5.23's kernels of ``KDAAttnBackend.forward_decode`` and ``o_norm``.

    Its recurrence is a CUDA kernel for fp32 states of 8 sequences and more, else Triton. It is
    compiled here by NVRTC, where sglang needs nvcc.
    """
    fla = "sglang.kernels.ops.attention.fla"
    packages(source, fla, "sglang.kernels.ops.mamba", "sglang.kernels.jit")
    arch = types.SimpleNamespace(major=9, minor=0)
    stub("sglang.kernels.jit.utils", is_arch_support_pdl=_has_pdl, get_jit_cuda_arch=lambda: arch)
    stub(
        "sglang.srt.utils",
        cdiv=triton.cdiv,
        next_power_of_2=triton.next_power_of_2,
        is_cpu=lambda: False,
        is_npu=lambda: False,
        cpu_has_amx_support=lambda: False,
    )
    stub("sglang.srt.utils.common", torch_release=(2, 11))
    attention = sys.modules["sglang.kernels.ops.attention"]
    vars(attention)["kda_packed_decode"] = types.SimpleNamespace(covered=lambda *_: False)
    try:
        conv = importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
        recurrent = importlib.import_module(f"{fla}.fused_recurrent")
        norm = importlib.import_module(f"{fla}.fused_norm_gate")
    except ImportError as error:
        print(f"sglang's kernels are left out: {error}", flush=True)
        return None
    packed_decode = functools.cache(lambda: _sglang_packed_decode(source))

    def make(x: Layer) -> Step:
        windows = x.windows.transpose(1, 2)
        weight = x.conv_weight.bfloat16()
        rows = x.qkv.shape[0]

        def cuda(mixed: torch.Tensor, out: torch.Tensor, indices: torch.Tensor) -> None:
            tensors = (mixed, x.g, x.beta, x.a_log, x.dt_bias, out, x.states, indices)
            strided = (mixed, x.g, x.beta, x.states)
            values = (
                *(tensor.data_ptr() for tensor in tensors),
                *(tensor.stride(0) for tensor in strided),
                *(x.heads, x.heads, DIM**-0.5, 0.0, 0),
            )
            params = _SGLANG_PARAMS.pack(**dict(zip(_SGLANG_PARAMS.names, values, strict=True)))
            packed_decode()(rows * x.heads, 32 * SGLANG_WARPS, params, pdl=True)

        def step(i: int) -> torch.Tensor:
            mixed = conv.causal_conv1d_update(
                x.qkv, windows, weight, None, activation="silu", conv_state_indices=x.indices[i]
            )
            out = mixed.new_empty(rows, 1, x.heads, DIM)
            if rows >= 8 and x.states.dtype == torch.float32:
                cuda(mixed, out, x.indices[i])
            else:
                recurrent.fused_recurrent_kda_packed_decode(
                    mixed_qkv=mixed,
                    a=x.g.flatten(1),
                    b=x.beta,
                    A_log=x.a_log,
                    dt_bias=x.dt_bias.flatten(),
                    scale=DIM**-0.5,
                    initial_state=x.states,
                    out=out,
                    ssm_state_indices=x.indices[i],
                    use_qk_l2norm_in_kernel=True,
                )
            return norm.rms_norm_gated(
                out[:, 0], x.z, x.norm_weight, None, activation="sigmoid", eps=EPS
            )

        return step

    return make


FLASHINFER_HEADS = (8, 12, 16, 24, 32, 48, 64, 96)


def load_flashinfer() -> Peer | None:
    """FlashInfer 0.7.4's ``fused_kda_decode`` in CuTe DSL, as it is installed: convolution,
    recurrence and norm in one launch. It wants slots that are aligned to 16 bytes, and states in
    fp32 or bf16."""
    try:
        from flashinfer import fused_kda_decode
    except ImportError as error:
        print(f"FlashInfer's kernel is left out: {error}", flush=True)
        return None

    def make(x: Layer) -> Step:
        if x.states.dtype == torch.float16:
            raise ValueError("FlashInfer takes no states in fp16")
        windows = x.windows.transpose(1, 2)
        weight = x.conv_weight.view(3, x.heads * DIM, 4).transpose(1, 2).contiguous()
        out = torch.empty_like(x.z)[None]
        slots = [row.clone() for row in x.indices]

        def step(i: int) -> torch.Tensor:
            y: torch.Tensor = fused_kda_decode(
                x=x.qkv,
                weight=weight,
                conv_state=windows,
                raw_gate=x.g[None],
                raw_beta=x.beta[None],
                A_log=x.a_log,
                dt_bias=x.dt_bias.flatten(),
                state_indices=slots[i],
                state=x.states,
                output_gate=x.z,
                norm_weight=x.norm_weight,
                lower_bound=None,
                norm_eps=EPS,
                output=out,
            )
            return y[0]

        return step

    return make


# Stands in for the headers of sglang that kda_packed_decode.cuh includes.
_SGLANG_PRELUDE = """
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long long int64_t;
typedef float fp32_t;
struct bf16_t { unsigned short bits; };
namespace device {
template <typename T> __device__ T cast(bf16_t x);
template <> __device__ inline fp32_t cast<fp32_t>(bf16_t x) {
    return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
template <typename T> __device__ T cast(float x);
template <> __device__ inline bf16_t cast<bf16_t>(float x) {
    bf16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <bool PDL> __device__ void PDLWaitPrimary() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
template <bool PDL> __device__ void PDLTriggerSecondary() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
namespace warp {
template <int N> __device__ float reduce_sum(float x) {
    for (int lane = N / 2; lane; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}
}
}
static constexpr int kWarps = WARPS;
static constexpr bool kUsePDL = true;
template <unsigned N> __global__ void shared_bytes() {}
template __global__ void shared_bytes<0>();
"""
_SGLANG_PARAMS = CudaParams(
    (
        *((name, "const void*") for name in ("mixed", "g", "beta", "a_log", "dt_bias", "out")),
        *(("states", "float*"), ("indices", "const int*")),
        *((f"stride_{name}", "i64") for name in ("mixed", "g", "beta", "states")),
        *(("heads", "int"), ("value_heads", "int"), ("scale", "float"), ("lower_bound", "float")),
        ("bounded", "int"),
    )
)
"""``KdaPackedDecodeParams``, by names of our own."""
SGLANG_WARPS = 8


def _sglang_packed_decode(source: Path) -> CudaKernel:
    """The kernel of kda_packed_decode.cuh as one function of NVRTC's."""
    text = (source / "sglang/kernels/jit/csrc/attention/kda_packed_decode.cuh").read_text()
    begin = text.index("struct KdaPackedDecodeParams")
    end = text.index("template <int kWarps, bool kUsePDL>\nstruct")
    head = "template <int kWarps, bool kUsePDL>\n__global__"
    body = text[begin:end].replace(head, 'extern "C" __global__')
    folder = Path(tempfile.mkdtemp())
    file = folder / "kda_packed_decode.cu"
    file.write_text(_SGLANG_PRELUDE + body)
    return CudaKernel(file, "kda_packed_decode_kernel", _SGLANG_PARAMS, {"WARPS": SGLANG_WARPS})


class _CustomOp(torch.nn.Module):
    """vLLM's registry of operators: the benchmark calls the functions below the classes."""

    @staticmethod
    def register(*_: Any, **__: Any) -> Callable[[type], type]:
        return lambda cls: cls


def _has_pdl() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
