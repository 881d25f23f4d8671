"""Peers of the verification benchmark: sglang's two ways of keeping what a draft may need.

Each is the launches that sglang 0.5.23 makes for the drafts of one Kimi-Linear layer, and for this
layer's part of the commit: convolution, recurrence, gated norm, then states and windows of the
accepted tokens. Kernels are read from an unpacked wheel, as in `kda_decode`.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from benchmarks.peers.kda_decode import DIM, EPS, Layer, _has_pdl
from benchmarks.peers.sources import packages, stub


@dataclass
class Drafts:
    """Drafts of ``tokens`` tokens of N sequences, for calls that meet no state twice.

    Attributes:
        layer: whose rows are the tokens of one sequence after another.
        slots: ``[calls, N]`` int32; accepted: ``[N]`` int32, 1 to ``tokens``.
    """

    layer: Layer
    tokens: int
    slots: torch.Tensor
    accepted: torch.Tensor

    @property
    def sequences(self) -> int:
        return self.slots.shape[1]


VerifyStep = Callable[[int], torch.Tensor]
"""Verifies the drafts of call i, commits what is accepted and returns the output [N T, H, 128]."""
VerifyPeer = Callable[[Drafts], VerifyStep]


def load_sglang_verification(source: Path) -> dict[str, VerifyPeer]:
    """By name; empty, and a line, where the kernels cannot be imported."""
    linear = "sglang.kernels.ops.attention.linear"
    packages(source, linear, "sglang.kernels.ops.attention.fla", "sglang.kernels.ops.mamba")
    packages(source, "sglang.kernels.jit", "sglang.kernels.ops.memory")
    arch = types.SimpleNamespace(major=9, minor=0)
    stub("sglang.kernels.jit.utils", is_arch_support_pdl=_has_pdl, get_jit_cuda_arch=lambda: arch)
    stub(
        "sglang.srt.utils",
        cdiv=triton.cdiv,
        next_power_of_2=triton.next_power_of_2,
        get_device_sm=lambda: 90,
        is_cuda=lambda: True,
        is_gfx95_supported=lambda: False,
        is_hip=lambda: False,
        is_sm90_supported=lambda: True,
        is_cpu=lambda: False,
        is_npu=lambda: False,
        cpu_has_amx_support=lambda: False,
    )
    stub("sglang.srt.utils.common", torch_release=(2, 11), get_device_core_count=_multiprocessors)
    try:
        conv = importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
        recurrent = importlib.import_module(f"{linear}.fused_sigmoid_gating_recurrent")
        records = importlib.import_module(f"{linear}.kda_replayssm_spec_decode")
        scatter = importlib.import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
        norm = importlib.import_module("sglang.kernels.ops.attention.fla.fused_norm_gate")
    except ImportError as error:
        print(f"sglang's verification is left out: {error}", flush=True)
        return {}
    kernels = types.SimpleNamespace(
        conv=conv.causal_conv1d_update,
        recurrent=recurrent.fused_sigmoid_gating_delta_rule_update,
        fold=records.commit_kda_replayssm_spec_all_layers,
        scatter_states=scatter.fused_mamba_state_scatter_with_mask,
        scatter_windows=scatter.fused_conv_window_scatter_with_mask,
        norm=norm.rms_norm_gated,
    )
    return {
        "sglang_states": lambda drafts: _sglang(kernels, drafts, keeps_states=True),
        "sglang_records": lambda drafts: _sglang(kernels, drafts, keeps_states=False),
    }


def _sglang(kernels: types.SimpleNamespace, drafts: Drafts, *, keeps_states: bool) -> VerifyStep:
    x, tokens, count = drafts.layer, drafts.tokens, drafts.sequences
    heads, device = x.heads, x.qkv.device
    channels, slots = 3 * heads * DIM, len(x.states)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    bounds = torch.arange(0, (count + 1) * tokens, tokens, dtype=torch.int32, device=device)
    last = (drafts.accepted - 1).long()
    weight, windows = x.conv_weight.bfloat16(), x.windows[:, :3].contiguous()
    after = torch.zeros(1, count, tokens, 3, channels, dtype=torch.bfloat16, device=device)
    kept: dict[str, object] = {"intermediate_states_buffer": None}
    ring: list[torch.Tensor] = []
    states = torch.empty(0, device=device)
    if keeps_states:
        states = torch.zeros(1, count, tokens, heads, DIM, DIM, device=device)
        kept = {"intermediate_states_buffer": states[0]}
    else:
        length = max(16, 2 * tokens)
        ring = [
            torch.zeros(1, slots, heads, length, *width, dtype=dtype, device=device)
            for width, dtype in (
                ((DIM,), torch.bfloat16),
                ((DIM,), torch.bfloat16),
                ((DIM,), torch.float32),
                ((), torch.float32),
            )
        ]
        names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
        kept |= {"cache_ring": True} | {n: y[0] for n, y in zip(names, ring, strict=True)}

    def step(i: int) -> torch.Tensor:
        mixed = kernels.conv(
            x.qkv.view(count, tokens, channels).transpose(1, 2),
            windows.transpose(1, 2),
            weight,
            None,
            activation="silu",
            conv_state_indices=drafts.slots[i],
            intermediate_conv_window=after[0].transpose(2, 3),
            intermediate_state_indices=rows,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_parent_token=None,
        )
        mixed = mixed.transpose(1, 2).reshape(count * tokens, channels)
        q, k, v = (y.unflatten(1, (heads, DIM))[None] for y in mixed.chunk(3, 1))
        out = kernels.recurrent(
            A_log=x.a_log,
            dt_bias=x.dt_bias.flatten(),
            q=q,
            k=k,
            v=v,
            a=x.g.flatten(1),
            b=x.beta,
            initial_state_source=x.states,
            initial_state_indices=drafts.slots[i],
            cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=True,
            disable_state_update=True,
            intermediate_state_indices=rows,
            cache_steps=tokens,
            retrieve_parent_token=None,
            **kept,
        )
        out = kernels.norm(out[0], x.z, x.norm_weight, None, activation="sigmoid", eps=EPS)
        if keeps_states:
            kernels.scatter_states(x.states[None], states, drafts.slots[i], last, None)
        else:
            kernels.fold(
                x.states[None],
                *ring,
                drafts.slots[i],
                drafts.accepted,
                max_cache_len=ring[0].shape[3],
                num_k_heads=heads,
                null_block_id=-1,
            )
        kernels.scatter_windows(windows[None], after, drafts.slots[i], last, None)
        result: torch.Tensor = out.view(count * tokens, heads, DIM)
        return result

    return step


def _multiprocessors(device: int = 0) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
