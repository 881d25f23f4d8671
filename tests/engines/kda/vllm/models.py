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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import vllm
from vllm.config import VllmConfig, set_current_vllm_config

from backend_core.engines import Engine
from kda_backend import reference
from kda_backend.engines.vllm import REPLACED
from tests.engines.kda.vllm.harness import Weights

HIDDEN, HEADS, DIM, EPS = 256, 2, 128, 1e-5


KIMI_LINEAR = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"


@dataclass(frozen=True)
class Model:
    """How one model's layer is made, and what of it a release has.

    Attributes:
        modules: where the class is, the first that the wheel has.
        low_rank: gates whose projections are two matrices: ``"f"`` and ``"g"``.
        packed: the packed projection's name, and the parts in it by their shard's number.
        config: of the model, from the gate's lower bound.
        build: the layer from its class, the model's configuration, vLLM's and its prefix.
        checkpoints: the first release whose layer exports states inside of prefills.
    """

    name: str
    modules: tuple[str, ...]
    low_rank: str
    packed: tuple[str, tuple[str, ...]]
    config: Callable[[float | None], Any]
    build: Callable[[Any, Any, VllmConfig, str], Any]
    checkpoints: str | None
    packed_conv: bool = False
    prefixes: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The module of this release that defines the class."""
        root = Path(vllm.__file__).parents[1]
        return next(m for m in self.modules if (root / f"{m.replace('.', '/')}.py").exists())

    @property
    def exports(self) -> bool:
        """Whether this release's layer exports states inside of prefills."""
        first = self.checkpoints
        return first is not None and Engine("vllm", first, None).supports(vllm.__version__)

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
            (KIMI_LINEAR,),
            "fg",
            ("in_proj_qkvgfab", ("q", "k", "v", "b", "f_a")),
            _kimi_linear_config,
            _build,
            checkpoints="0.32.0",
            packed_conv=True,
        ),
        Model(
            "Kimi-K3",
            ("vllm.models.kimi_k3.nvidia.kda",),
            "f",
            ("in_proj_qkvgfab", ("q", "k", "v", "g", "f_a", "b")),
            _k3_config,
            _build,
            checkpoints="0.30.0",
            packed_conv=True,
        ),
        Model(
            "GLM-5.3-Flash",
            ("vllm.models.glm5next.common.kda", "vllm.models.glm5next.nvidia.kda"),
            "fg",
            ("in_proj_qkvbfg_a", ("q", "k", "v", "b", "f_a", "g_a")),
            _glm_config,
            _build,
            checkpoints="0.32.0",
        ),
        Model(
            "Ling-V3",
            ("vllm.model_executor.models.bailing_moe_v3",),
            "",
            ("qkvb_proj", ("q", "k", "v", "b")),
            _ling_config,
            _build_ling,
            checkpoints=None,
        ),
    )
}


def drawn(model: Model, seed: int = 7) -> Weights:
    """Parameters by their parts: projections, convolutions, gate, norm."""
    rng = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float32)

    channels = HEADS * DIM
    weights = {part: 0.06 * randn(channels, HIDDEN).bfloat16() for part in "qkv"}
    weights["b"] = 0.06 * randn(HEADS, HIDDEN).bfloat16()
    for part in "fg":
        if part in model.low_rank:
            weights[f"{part}_a"] = 0.06 * randn(DIM, HIDDEN).bfloat16()
            weights[f"{part}_b"] = 0.09 * randn(channels, DIM).bfloat16()
        else:
            weights[part] = 0.06 * randn(channels, HIDDEN).bfloat16()
    for part in "qkv":
        weights[f"{part}_conv"] = 0.5 * randn(channels, 1, 4)
    weights["A_log"] = randn(HEADS)
    weights["dt_bias"] = randn(channels)
    weights["o_norm"] = 1.0 + 0.1 * randn(DIM).bfloat16()
    weights["o"] = 0.02 * randn(HIDDEN, channels).bfloat16()
    return weights


def build(
    model: Model, config: VllmConfig, lower_bound: float | None = -5.0, index: int = 0
) -> Any:
    """The layer as its model builds it, with random weights by its own loaders."""
    prefix = f"model.layers.{index}.self_attn"
    with set_current_vllm_config(config):
        layer = model.build(model.upstream(), model.config(lower_bound), config, prefix)
    load(layer, model, drawn(model))
    for module in layer.modules():
        if hasattr(module, "quant_method"):
            # what vLLM sets on a CPU after loading; its packed form is in the library for CPUs
            module.cpu_linear = lambda x, weight, bias: F.linear(x, weight, bias)
    return layer


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
        put(f"{name}.weight", weights[part], shard)
    for part in (part for part in ("f", "g", "f_b", "g_a", "g_b") if part in weights):
        if part not in parts:
            put(f"{part}_proj.weight", weights[part])
    for shard, part in enumerate("qkv"):
        if model.packed_conv:
            put("conv1d.weight", weights[f"{part}_conv"], shard)
        else:
            put(f"{part}_conv1d.weight", weights[f"{part}_conv"])
    for part in ("A_log", "dt_bias"):
        put(part, weights[part])
    put("o_norm.weight", weights["o_norm"])
    put("o_proj.weight", weights["o"])


class Definition:
    """A layer by its mathematics in float64, from the random weights alone."""

    def __init__(self, model: Model, lower_bound: float | None = -5.0) -> None:
        self.w = {name: x.double() for name, x in drawn(model).items()}
        self.lower_bound = lower_bound
        self.conv = torch.zeros(3 * HEADS * DIM, 3, dtype=torch.float64)
        self.state = torch.zeros(1, HEADS, DIM, DIM, dtype=torch.float64)

    def _gate(self, part: str, x: torch.Tensor) -> torch.Tensor:
        if part in self.w:
            y = x @ self.w[part].T
        else:
            y = x @ self.w[f"{part}_a"].T @ self.w[f"{part}_b"].T
        return y.view(-1, HEADS, DIM)

    def run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The next tokens ``[T, hidden]`` of one sequence; the states move on."""
        w, x = self.w, hidden_states.double()
        qkv = torch.cat([x @ w[part].T for part in "qkv"], 1)
        filters = torch.cat([w[f"{part}_conv"].flatten(1) for part in "qkv"])
        line = torch.cat([self.conv, qkv.T], 1)
        self.conv = line[:, -3:]
        mixed = F.silu(F.conv1d(line[None], filters[:, None], groups=line.shape[0])[0]).T
        q, k, v = mixed.reshape(x.shape[0], 3, HEADS, DIM).unbind(1)
        bias = w["dt_bias"].view(HEADS, DIM)
        o, self.state = reference.recurrent_kda(
            reference.l2norm(q),
            reference.l2norm(k),
            v,
            reference.log_decay(self._gate("f", x), w["A_log"], bias, self.lower_bound),
            (x @ w["b"].T).sigmoid(),
            scale=DIM**-0.5,
            state=self.state,
            cu_seqlens=[0, x.shape[0]],
        )
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * w["o_norm"]
        o = o * self._gate("g", x).sigmoid()
        return o.flatten(1) @ w["o"].T
