"""The core of a KDA layer as an operator that splits the graph which vLLM compiles."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from kda_backend.engines.vllm_layer import attend

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


def split_graph_at_core(vllm_config: VllmConfig) -> None:
    """Let prefills run outside of CUDA graphs, as upstream's own operator does."""
    splitting = vllm_config.compilation_config.splitting_ops
    if splitting and f"vllm::{_OP}" not in splitting:
        splitting.append(f"vllm::{_OP}")
