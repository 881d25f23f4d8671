"""The KDA layers of Kimi-K3, GLM-5.3-Flash and Ling-V3, on the CPU: tiny, with random weights.

Each is the model's own class in the wheel, built under a configuration with the fields that it
reads, and loaded by its own loaders.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import vllm
from vllm.config import VllmConfig, set_current_vllm_config

from kda_backend.engines.vllm import REPLACED
from tests.engines.kda.weights import DIM, EPS, HIDDEN, Definition, Weights, drawn

HEADS = 2


KIMI_LINEAR = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"


@dataclass(frozen=True)
class Model:
    """How one model's layer is made.

    Attributes:
        module: where the class is.
        low_rank: gates whose projections are two matrices: ``"f"`` and ``"g"``.
        packed: the packed projection's name, and the parts in it by their shard's number.
        config: of the model, from the gate's lower bound.
        build: the layer from its class, the model's configuration, vLLM's and its prefix.
        exports: whether the layer exports states inside of prefills; packed_conv: whether its
            convolutions have one weight.
    """

    name: str
    module: str
    low_rank: str
    packed: tuple[str, tuple[str, ...]]
    config: Callable[[float | None], Any]
    build: Callable[[Any, Any, VllmConfig, str], Any]
    exports: bool
    packed_conv: bool = False

    def upstream(self) -> Any:
        """vLLM's class."""
        _without_torchvision()
        return getattr(importlib.import_module(self.module), REPLACED[self.module].name)


def _without_torchvision() -> None:
    """GLM's package imports its vision tower, which needs torchvision: not the layer's module."""
    name = "vllm.models.glm5next"
    if name not in sys.modules and importlib.util.find_spec("torchvision") is None:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(vllm.__file__).parent / "models" / "glm5next")]
        sys.modules[name] = package


def _kimi_linear_config(lower_bound: float | None) -> Any:
    config = _k3_config(lower_bound)
    config.linear_attn_config["use_full_rank_gate"] = False
    return config


def _k3_config(lower_bound: float | None) -> Any:
    linear = {
        "head_dim": DIM,
        "num_heads": HEADS,
        "short_conv_kernel_size": 4,
        "kda_layers": [1],
        "full_attn_layers": [2],
        "use_full_rank_gate": True,
        "gate_lower_bound": lower_bound,
    }
    return types.SimpleNamespace(
        hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=EPS, linear_attn_config=linear
    )


def _glm_config(lower_bound: float | None) -> Any:
    return types.SimpleNamespace(
        model_type="glm5_next_text",
        hidden_size=HIDDEN,
        hidden_act="silu",
        rms_norm_eps=EPS,
        linear_head_dim=DIM,
        linear_num_heads=HEADS,
        linear_conv_kernel_dim=4,
        linear_lower_bound=lower_bound,
    )


def _ling_config(lower_bound: float | None) -> Any:
    return types.SimpleNamespace(
        model_type="bailing_hybrid",
        hidden_size=HIDDEN,
        rms_norm_eps=EPS,
        head_dim=DIM,
        num_attention_heads=HEADS,
        short_conv_kernel_size=4,
        kda_safe_gate=lower_bound is not None,
        kda_lower_bound=lower_bound,
        no_kda_lora=True,
    )


def _build(cls: Any, config: Any, vllm_config: VllmConfig, prefix: str) -> Any:
    return cls(config, vllm_config, prefix=prefix)


def _build_ling(cls: Any, config: Any, vllm_config: VllmConfig, prefix: str) -> Any:
    speculative = vllm_config.speculative_config
    return cls(
        config,
        prefix=prefix,
        model_config=vllm_config.model_config,
        cache_config=vllm_config.cache_config,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
    )


MODELS = {
    model.name: model
    for model in (
        Model(
            "Kimi-Linear",
            KIMI_LINEAR,
            "fg",
            ("in_proj_qkvgfab", ("q", "k", "v", "b", "f_a")),
            _kimi_linear_config,
            _build,
            exports=True,
            packed_conv=True,
        ),
        Model(
            "Kimi-K3",
            "vllm.models.kimi_k3.nvidia.kda",
            "f",
            ("in_proj_qkvgfab", ("q", "k", "v", "g", "f_a", "b")),
            _k3_config,
            _build,
            exports=True,
            packed_conv=True,
        ),
        Model(
            "GLM-5.3-Flash",
            "vllm.models.glm5next.common.kda",
            "fg",
            ("in_proj_qkvbfg_a", ("q", "k", "v", "b", "f_a", "g_a")),
            _glm_config,
            _build,
            exports=True,
        ),
        Model(
            "Ling-V3",
            "vllm.model_executor.models.bailing_moe_v3",
            "",
            ("qkvb_proj", ("q", "k", "v", "b")),
            _ling_config,
            _build_ling,
            exports=False,
        ),
    )
}


def build(
    model: Model,
    config: VllmConfig,
    lower_bound: float | None = -5.0,
    index: int = 0,
    weights: Weights | None = None,
) -> Any:
    """The layer as its model builds it, with random weights by its own loaders."""
    prefix = f"model.layers.{index}.self_attn"
    with set_current_vllm_config(config):
        layer = model.build(model.upstream(), model.config(lower_bound), config, prefix)
    load(layer, model, weights or drawn(HEADS, model.low_rank))
    return layer


def definition_of(model: Model, lower_bound: float | None = -5.0) -> Definition:
    """The layer that `build` makes, in float64."""
    return Definition(drawn(HEADS, model.low_rank), lower_bound)


def load(layer: Any, model: Model, weights: Weights) -> None:
    """By the parameters' own loaders, a shard at a time where they are packed."""
    parameters = dict(layer.named_parameters())

    def put(name: str, tensor: torch.Tensor, *shard: int) -> None:
        parameter = parameters[name]
        loader = getattr(parameter, "weight_loader", None)
        if loader is None:
            parameter.data.copy_(tensor)
        else:
            loader(parameter, tensor, *shard)

    name, parts = model.packed
    for shard, part in enumerate(parts):
        put(f"{name}.weight", weights[f"{part}_proj.weight"], shard)
    for part in ("f", "g", "f_b", "g_a", "g_b"):
        if part not in parts and f"{part}_proj.weight" in weights:
            put(f"{part}_proj.weight", weights[f"{part}_proj.weight"])
    for shard, part in enumerate("qkv"):
        filters = weights[f"{part}_conv1d.weight"]
        if model.packed_conv:
            put("conv1d.weight", filters, shard)
        else:
            put(f"{part}_conv1d.weight", filters)
    for rest in ("A_log", "dt_bias", "o_norm.weight", "o_proj.weight"):
        put(rest, weights[rest])
    for module in layer.modules():
        if hasattr(module, "quant_method"):
            # what vLLM sets on a CPU after loading; its packed form is in the library for CPUs
            module.cpu_linear = lambda x, weight, bias: F.linear(x, weight, bias)
