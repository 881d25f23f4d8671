"""Weights of separate convolutions in one matrix, which the kernels read as q's, k's and v's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig

from kda_backend.layer import LayerWeights


def pack(*projections: Any) -> torch.Tensor:
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


class SeparateConvs:
    """A layer whose three convolutions have weights of their own; stands before the engine's class.

    Attributes:
        kda_lower_bound: of its gate; ``None`` without one.
    """

    kda_lower_bound: float | None
    _kda_conv: torch.Tensor
    _kda_weights: LayerWeights | None = None

    def pack_convs(self: Any, channels: int) -> None:
        """As the layer is built: ``channels`` rows of q's, k's and v's on this rank together."""
        self._kda_conv = pack(self.q_conv1d, self.k_conv1d, self.v_conv1d)[:channels]

    def kda_weights(self: Any) -> LayerWeights:
        """What the core's kernels read, once the checkpoint has been loaded."""
        if self._kda_weights is None:
            check_views(self.prefix, [(self.q_conv1d, self._kda_conv)])
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


def check_views(name: str, views: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """The checkpoint must have been loaded into the packed matrices.

    Args:
        name: of the layer; views: first projection of each matrix, and the matrix.

    Raises:
        RuntimeError: something has moved the weights.
    """
    for module, packed in views:
        if module.weight.data_ptr() != packed.data_ptr():
            raise RuntimeError(
                f"the weights of {name} moved after the layer was built, by an option that"
                " this backend does not know: serve without --attention-backend"
            )


def refusal_of_offload(vllm_config: VllmConfig) -> str | None:
    """Why a layer with packed convolutions is not served where weights are offloaded: they are
    then not where they were made."""
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        return "weights are kept in host memory, and those of convolutions are packed"
    return None
