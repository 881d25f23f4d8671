"""The KDA layer of vLLM 0.27 to 0.33: packed projections, output norm inside ``_forward``.

Upstream's ``forward`` stays. To be removed when vLLM's layer changes again.
"""

from __future__ import annotations

import torch
import vllm
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

from backend_core.engines import Engine
from kda_backend.engines.vllm_layer import attend, runtime_of
from kda_backend.layer import LayerWeights
from kda_backend.selection import KdaShape


class KdaLayer(KimiGatedDeltaNetAttention):  # type: ignore[misc]
    def __init__(self, config: KimiLinearConfig, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(config, vllm_config, prefix)
        dtype = vllm_config.model_config.dtype
        heads, dim = self.local_num_heads, self.head_dim
        bounded = self.gate_lower_bound is not None
        shape = KdaShape(heads, heads, dim, dim, bounded, dtype, dtype)
        drafts = Engine("vllm", "0.30.0", None).supports(vllm.__version__)
        full_rank = getattr(self, "use_full_rank_gate", False)
        runtime = runtime_of(
            vllm_config, self, shape, verifies_drafts=drafts, full_rank_gate=full_rank
        )
        if runtime is None:
            self.__class__ = KimiGatedDeltaNetAttention
            return
        self.kda_runtime = runtime
        self.kda_weights: LayerWeights | None = None

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def _forward(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """As upstream: ``mixed_qkv [T, 3 H D]``, ``g1``, ``core_attn_out [1, T, H, D]``,
        ``g2 [T, H, D]``, ``beta [1, T, H]`` logits; writes ``core_attn_out``, normed and gated."""
        if self.kda_weights is None:
            self.kda_weights = LayerWeights(
                self.conv1d.weight.data.flatten(1),
                self.A_log.data,
                self.dt_bias.data,
                self.o_norm.weight.data,
                self.o_norm.eps,
                self.gate_lower_bound,
            )
        attend(
            self.kda_runtime,
            self.kda_weights,
            self,
            mixed_qkv,
            g1[0],
            beta[0],
            g2,
            core_attn_out[0],
        )
