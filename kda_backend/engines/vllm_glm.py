"""GLM-5.3-Flash's KDA layer.

Its convolutions have separate weights, its forget gate has a lower bound, and upstream norms the
output outside of the core. Here the norm belongs to the core's kernels, so that ``forward`` is
ours. Prefills export states that the prefix cache keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from backend_core.engines.seams import Part
from kda_backend.engines.vllm_convs import SeparateConvs
from kda_backend.engines.vllm_metadata import ExportsCheckpoints
from kda_backend.engines.vllm_states import HonoursStateDtype, become_upstreams
from kda_backend.engines.vllm_tables import breaks_without_tables


def layer_class(upstream: Any, part: Part) -> Any:
    """Our class in the place of ``upstream``, ``Glm5NextLinearAttention``."""

    class KdaLayer(SeparateConvs, ExportsCheckpoints, HonoursStateDtype, upstream):  # type: ignore[misc]
        exports = True
        captured_on_tables = True

        def __init__(
            self, config: Any, vllm_config: VllmConfig, prefix: str = "", **options: Any
        ) -> None:
            super().__init__(config, vllm_config, prefix, **options)
            if not self.take_over(vllm_config, part, checkpoints=self.exports):
                become_upstreams(self, upstream, vllm_config)

        def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            """Run as upstream does: ``hidden_states [T, hidden]``."""
            heads, dim, channels = self.local_num_heads, self.head_dim, self.local_projection_size
            projected = self.in_proj_qkvbfg_a(hidden_states)[0]
            qkv, beta, f_a, g_a = projected.split([3 * channels, heads, dim, dim], dim=-1)
            g = self.f_b_proj(f_a)[0].view(-1, heads, dim)
            gate = self.g_b_proj(g_a)[0].view(-1, heads, dim)
            out = hidden_states.new_empty(hidden_states.shape[0], heads, dim)
            self._attend(qkv, g, beta, gate, out)
            projected_out: torch.Tensor = self.o_proj(out.flatten(1))[0]
            return projected_out

        @breaks_without_tables
        def _attend(
            self,
            qkv: torch.Tensor,
            g: torch.Tensor,
            beta: torch.Tensor,
            gate: torch.Tensor,
            out: torch.Tensor,
        ) -> None:
            """qkv ``[T, 3 H D]``; g, gate and out ``[T, H, D]``; beta ``[T, H]``. Writes out."""
            self.kda_attend(qkv, g, beta, gate, out)

    return KdaLayer
