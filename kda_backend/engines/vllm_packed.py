"""The core of KDA layers whose convolutions lie in one weight and whose norm is in ``_forward``.

Such are Kimi-Linear's, AliceAI's and Kimi-K3's. Upstream's ``forward`` stays.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture

from kda_backend.engines.vllm_layer import attend
from kda_backend.engines.vllm_lengths import KeepsLengths
from kda_backend.engines.vllm_run import Runtime
from kda_backend.layer import LayerWeights


class PackedCore(KeepsLengths):
    """Stands before the engine's class among the bases of ours."""

    kda_runtime: Runtime
    kda_weights: LayerWeights | None = None

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def _forward(
        self: Any,
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
