"""The KDA layer of vLLM 0.26: separate projections, the core as an operator that splits the graph.

Upstream code runs eight GEMMs, three convolutions and the norm as separate kernels. Here the
weights that read the same input lie in one matrix, of which the checkpoint's parameters are views:
a layer is two GEMMs before its core and one after it. To be removed with support for 0.26.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

from kda_backend.engines.vllm_convs import check_views, pack, refusal_of_offload
from kda_backend.engines.vllm_layer import runtime_of
from kda_backend.engines.vllm_op import split_graph_at_core
from kda_backend.layer import LayerWeights


class KdaLayer(KimiGatedDeltaNetAttention):  # type: ignore[misc]
    def __init__(self, config: KimiLinearConfig, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        heads, dim = self.local_num_heads, self.head_dim
        runtime = runtime_of(vllm_config, self, None, refusal=refusal_of_offload(vllm_config))
        if runtime is None:
            self.__class__ = KimiGatedDeltaNetAttention
            return
        self.kda_runtime = runtime
        self._weights: LayerWeights | None = None
        self._conv = pack(self.q_conv1d, self.k_conv1d, self.v_conv1d)[: 3 * heads * dim]
        # Quantised weights are not where they were made.
        self._packed = self.quant_config is None
        # Outside of a compiled graph, which plans its own buffers, the product needs no copy.
        self._writes_output = self._packed and self.o_proj.tp_size == 1
        if self._packed:
            in_proj = pack(
                self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.g_a_proj, self.b_proj
            )
            out_gates = pack(self.f_b_proj, self.g_b_proj)[: 2 * heads * dim]
            self.register_buffer("_in_proj", in_proj, persistent=False)
            self.register_buffer(
                "_out_gates", out_gates.view(2, heads * dim, dim), persistent=False
            )
        split_graph_at_core(vllm_config)

    def kda_weights(self) -> LayerWeights:
        if self._weights is None:
            views = [(self.q_conv1d, self._conv)]
            if self._packed:
                views += [(self.q_proj, self._in_proj), (self.f_b_proj, self._out_gates)]
            check_views(self.prefix, views)
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
