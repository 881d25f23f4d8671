"""Weights of separate convolutions in one matrix, which the kernels read as q's, k's and v's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig


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


def offloads(vllm_config: VllmConfig) -> bool:
    """Whether weights are kept in host memory, and so are not where they were made."""
    offload = vllm_config.offload_config
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)
