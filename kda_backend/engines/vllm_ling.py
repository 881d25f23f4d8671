"""Ling-V3's KDA layer.

Its projections have full rank, its convolutions separate weights, and upstream activates gates and
norms the output outside of the core. Here both belong to the core's kernels, so that ``forward`` is
ours; the core is an operator that splits the compiled graph, as upstream's is.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from backend_core.engines.seams import Part
from kda_backend.engines.vllm_convs import SeparateConvs
from kda_backend.engines.vllm_states import HonoursStateDtype, become_upstreams

_OP = "kda_dsv4_core"


def kda_dsv4_core(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    layer_name: str,
) -> None:
    """qkv ``[T, 3 H D]``; g, gate and out ``[T, H, D]``; beta ``[T, H]``. Writes out."""
    layer = get_forward_context().no_compile_layers[layer_name]
    layer.kda_attend(qkv, g, beta, gate, out)


def _writes_only_out(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    layer_name: str,
) -> None:
    return


direct_register_custom_op(
    op_name=_OP, op_func=kda_dsv4_core, mutates_args=["out"], fake_impl=_writes_only_out
)


def layer_class(upstream: Any, part: Part) -> Any:
    """Our class in the place of ``upstream``, ``BailingMoeV3KimiDeltaAttention``."""

    class KdaLayer(SeparateConvs, HonoursStateDtype, upstream):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            vllm_config = get_current_vllm_config()
            self.kda_lower_bound = self.lower_bound if self.safe_gate else None
            if not self.take_over(vllm_config, part):
                become_upstreams(self, upstream, vllm_config)
                return
            # prefills run outside of CUDA graphs, as with upstream's own operator
            splitting = vllm_config.compilation_config.splitting_ops
            if splitting and f"vllm::{_OP}" not in splitting:
                splitting.append(f"vllm::{_OP}")

        def forward(
            self, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
        ) -> None:
            """Run as upstream does: ``hidden_states [T, hidden]``; writes ``output``."""
            heads, dim = self.local_num_heads, self.head_dim
            channels = 3 * self.projection_size_per_partition
            if self.separate_b_proj:
                qkv = self.qkv_proj(hidden_states)[0]
                beta = self.b_proj(hidden_states)[0]
            else:
                qkv, beta = self.qkvb_proj(hidden_states)[0].split([channels, heads], dim=-1)
            g = self.f_proj(hidden_states)[0].view(-1, heads, dim)
            gate = self.g_proj(hidden_states)[0].view(-1, heads, dim)
            out = hidden_states.new_empty(hidden_states.shape[0], heads, dim)
            torch.ops.vllm.kda_dsv4_core(qkv, g, beta, gate, out, self.prefix)
            output[:] = self.o_proj(out.flatten(1))[0]

    return KdaLayer
