"""Weights of separate convolutions in one matrix, which the kernels read as q's, k's and v's."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig

from kda_backend.engines.vllm_lengths import KeepsLengths
from kda_backend.layer import LayerWeights


class SeparateConvs(KeepsLengths):
    """A layer whose three convolutions have weights of their own; stands before the engine's class.

    Attributes:
        kda_lower_bound: of its gate; ``None`` without one.
    """

    kda_lower_bound: float | None
    _kda_conv: torch.Tensor
    _kda_weights: LayerWeights | None = None

    def pack_convs(self: Any) -> None:
        """As the layer is built: one matrix of q's, k's and v's rows, of which their weights become
        views."""
        weights = [conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        self._kda_conv = torch.cat([weight.data for weight in weights])
        parts = self._kda_conv.split([weight.shape[0] for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part

    def kda_weights(self: Any) -> LayerWeights:
        """What the core's kernels read, once the checkpoint has been loaded.

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
                self.A_log.data.flatten(),
                self.dt_bias.data,
                self.o_norm.weight.data,
                self.o_norm.eps,
                self.kda_lower_bound,
            )
        weights: LayerWeights = self._kda_weights
        return weights


def refusal_of_offload(vllm_config: VllmConfig) -> str | None:
    """Why a layer with packed convolutions is not served where weights are offloaded: they are
    then not where they were made."""
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        return "weights are kept in host memory, and those of convolutions are packed"
    return None
