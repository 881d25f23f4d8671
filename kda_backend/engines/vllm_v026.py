"""The KDA layer of vLLM 0.26: separate projections, the core as an operator that splits the graph.

Upstream code runs eight GEMMs, three convolutions and the norm as separate kernels. Here the
weights that read the same input lie in one matrix, of which the checkpoint's parameters are views:
a layer is two GEMMs before its core and one after it. To be removed with support for 0.26.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.utils.torch_utils import direct_register_custom_op

from kda_backend.engines.vllm_layer import attend, runtime_of
from kda_backend.layer import LayerWeights
from kda_backend.selection import KdaShape

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
    attend(layer.kda_runtime, layer.kda_weights(), layer, qkv, g, beta, gate, out)


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


class KdaLayer(KimiGatedDeltaNetAttention):  # type: ignore[misc]
    def __init__(self, config: KimiLinearConfig, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        dtype = vllm_config.model_config.dtype
        heads, dim = self.local_num_heads, self.head_dim
        shape = KdaShape(heads, heads, dim, dim, False, dtype, dtype)
        runtime = runtime_of(vllm_config, self, shape, verifies_drafts=False)
        if runtime is None:
            self.__class__ = KimiGatedDeltaNetAttention
            return
        self.kda_runtime = runtime
        self._weights: LayerWeights | None = None
        self._conv = _pack(self.q_conv1d, self.k_conv1d, self.v_conv1d)[: 3 * heads * dim]
        # Quantised weights and offloaded ones are not where they were made.
        offload = vllm_config.offload_config
        offloads = offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size
        self._packed = self.quant_config is None and not offloads
        # Outside of a compiled graph, which plans its own buffers, the product needs no copy.
        self._writes_output = self._packed and self.o_proj.tp_size == 1
        if self._packed:
            in_proj = _pack(
                self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.g_a_proj, self.b_proj
            )
            out_gates = _pack(self.f_b_proj, self.g_b_proj)[: 2 * heads * dim]
            self.register_buffer("_in_proj", in_proj, persistent=False)
            self.register_buffer(
                "_out_gates", out_gates.view(2, heads * dim, dim), persistent=False
            )
        # Prefills run outside of CUDA graphs, as upstream's own operator does.
        splitting = vllm_config.compilation_config.splitting_ops
        if splitting and f"vllm::{_OP}" not in splitting:
            splitting.append(f"vllm::{_OP}")

    def kda_weights(self) -> LayerWeights:
        if self._weights is None:
            self._check_views()
            self._weights = LayerWeights(
                self._conv.flatten(1),
                self.A_log.data,
                self.dt_bias.data,
                self.o_norm.weight.data,
                self.o_norm.eps,
                None,
            )
        return self._weights

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        """As upstream: ``hidden_states [T, hidden]``; writes ``output``."""
        heads, dim = self.local_num_heads, self.head_dim
        tokens, channels = hidden_states.shape[0], heads * dim
        if self._packed:
            projected = F.linear(hidden_states, self._in_proj)
            sizes = [3 * channels, 2 * dim, heads]
            padding = projected.shape[1] - sum(sizes)
            qkv, low_rank, beta, _ = torch.split(projected, [*sizes, padding], dim=1)
            low_rank = low_rank.view(tokens, 2, dim).transpose(0, 1)
            g, gate = torch.bmm(low_rank, self._out_gates.transpose(1, 2)).unbind(0)
        else:
            qkv = torch.cat(
                [proj(hidden_states)[0] for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=1
            )
            beta = self.b_proj(hidden_states)[0]
            g = self.f_b_proj(self.f_a_proj(hidden_states)[0])[0]
            gate = self.g_b_proj(self.g_a_proj(hidden_states)[0])[0]
        out = hidden_states.new_empty(tokens, heads, dim)
        torch.ops.vllm.kda_dsv4_core(
            qkv,
            g.view(tokens, heads, dim),
            beta,
            gate.view(tokens, heads, dim),
            out,
            self.prefix,
        )
        core = out.view(tokens, channels)
        if self._writes_output and not torch.compiler.is_compiling():
            torch.mm(core, self.o_proj.weight.t(), out=output)
        else:
            output[:] = self.o_proj(core)[0]

    def _check_views(self) -> None:
        """The checkpoint must have been loaded into the packed matrices."""
        views: list[tuple[Any, torch.Tensor]] = [(self.q_conv1d, self._conv)]
        if self._packed:
            views += [(self.q_proj, self._in_proj), (self.f_b_proj, self._out_gates)]
        for module, packed in views:
            if module.weight.data_ptr() != packed.data_ptr():
                raise RuntimeError(
                    f"the weights of {self.prefix} moved after the layer was built, by an option"
                    f" that --attention-backend CUSTOM does not know: serve without the flag"
                )


def _pack(*projections: Any) -> torch.Tensor:
    """One matrix of the projections' rows, of which their weights become views.

    Padded with zero rows to a multiple of 16, so that the rows of its product are aligned.
    """
    weights = [projection.weight for projection in projections]
    rows = sum(weight.shape[0] for weight in weights)
    packed: torch.Tensor = weights[0].data.new_zeros(rows + -rows % 16, *weights[0].shape[1:])
    begin = 0
    for weight in weights:
        end = begin + weight.shape[0]
        weight.data = packed[begin:end]
        begin = end
    return packed
