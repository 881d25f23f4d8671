"""Weights of separate convolutions in one matrix, which the kernels read as q's, k's and v's."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from backend_core.engines.seams import Part
from backend_core.engines.vllm_flag import offloads_weights
from kda_backend.contract.values import GateSpec
from kda_backend.engines.vllm_layer import attend, runtime_of
from kda_backend.engines.vllm_metadata import KeepsLengths
from kda_backend.layer import LayerWeights


class SeparateConvs(KeepsLengths):
    """A layer whose three convolutions have weights of their own; stands before the engine's class.

    Attributes:
        kda_lower_bound: of its gate; ``None`` without one.
    """

    kda_lower_bound: float | None
    _kda_conv: torch.Tensor
    _kda_weights: LayerWeights | None = None

    def take_over(
        self: Any, vllm_config: VllmConfig, part: Part, *, checkpoints: bool = False
    ) -> bool:
        """Ask for the runtime as the layer is built, and make one matrix of the rows of q, k and
        v, of which their weights become views. False where upstream's code serves the layer.

        Args:
            part: what is relied on of this layer.
        """
        refusal = None
        if offloads_weights(vllm_config):
            refusal = "weights are kept in host memory, and those of convolutions are packed"
        self.kda_runtime = runtime_of(
            vllm_config, self, self.kda_lower_bound, part, checkpoints=checkpoints, refusal=refusal
        )
        if self.kda_runtime is None:
            return False
        weights = [conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        self._kda_conv = torch.cat([weight.data for weight in weights])
        parts = self._kda_conv.split([weight.shape[0] for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part
        return True

    def kda_attend(self: Any, *projections: torch.Tensor) -> None:
        """`attend`, with the weights as they are once the checkpoint has been loaded.

        Raises:
            RuntimeError: something has moved the weights.
        """
        if self._kda_weights is None:
            if self.q_conv1d.weight.data_ptr() != self._kda_conv.data_ptr():
                raise RuntimeError(
                    f"the weights of {self.prefix} moved after the layer was built, by an option"
                    " that this backend does not know: serve without --attention-backend"
                )
            self._kda_weights = LayerWeights(
                self._kda_conv.flatten(1),
                GateSpec.of(self.A_log.data.flatten(), self.dt_bias.data, self.kda_lower_bound),
                self.o_norm.weight.data,
                self.o_norm.eps,
            )
        attend(self, self._kda_weights, *projections)
