"""The KDA layers of Kimi-Linear, which AliceAI builds too, and of Kimi-K3.

Their convolutions lie in one weight and their norm is in ``_forward``; upstream's ``forward``
stays. Kimi-K3's forget gate has a lower bound, and its prefills export states that the prefix cache
keeps. Kimi-Linear's metadata can ask for these, although upstream's layer exports none: there the
scheduler ends a step at the last block of a prompt, and runs the tokens after it in
a step of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import VllmConfig

from backend_core.engines.seams import Part
from kda_backend.contract.values import GateSpec
from kda_backend.engines.vllm_layer import attend, runtime_of
from kda_backend.engines.vllm_metadata import ExportsCheckpoints, KeepsLengths
from kda_backend.engines.vllm_states import HonoursStateDtype, become_upstreams
from kda_backend.engines.vllm_tables import breaks_without_tables
from kda_backend.layer import LayerWeights


def layer_class(upstream: Any, part: Part) -> Any:
    """Our class in the place of ``upstream``, ``KimiGatedDeltaNetAttention`` or the platform's own
    ``KimiK3DeltaAttention``."""

    class KdaLayer(KeepsLengths, ExportsCheckpoints, HonoursStateDtype, upstream):  # type: ignore
        kda_weights: LayerWeights | None = None
        captured_on_tables = True

        @functools.wraps(upstream.__init__)  # type: ignore[misc]
        def __init__(
            self, config: Any, vllm_config: VllmConfig, prefix: str = "", **options: Any
        ) -> None:
            """``options`` are those of upstream's class on this platform and in this release."""
            super().__init__(config, vllm_config, prefix, **options)
            # Kimi-K3's layer on AMD has an option against it
            self.exports = bool(getattr(self, "use_prefill_checkpoint", True))
            self.kda_runtime = runtime_of(
                vllm_config,
                self,
                self.gate_lower_bound,
                part,
                checkpoints=self.exports,
            )
            if self.kda_runtime is None:
                become_upstreams(self, upstream, vllm_config)

        @breaks_without_tables
        def _forward(
            self,
            mixed_qkv: torch.Tensor,
            g1: torch.Tensor,
            g2: torch.Tensor,
            beta: torch.Tensor,
            core_attn_out: torch.Tensor,
        ) -> None:
            """Run as upstream does: ``mixed_qkv [T, 3 H D]``, ``g1``, ``g2 [T, H, D]``,
            ``core_attn_out [1, T, H, D]``, ``beta [1, T, H]`` logits; writes ``core_attn_out``,
            normed and gated."""
            if self.kda_weights is None:
                self.kda_weights = LayerWeights(
                    self.conv1d.weight.data.flatten(1),
                    GateSpec.of(self.A_log.data, self.dt_bias.data, self.gate_lower_bound),
                    self.o_norm.weight.data,
                    self.o_norm.eps,
                )
            attend(self, self.kda_weights, mixed_qkv, g1[0], beta[0], g2, core_attn_out[0])

    return KdaLayer
