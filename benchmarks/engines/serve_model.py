"""The model of a serve benchmark, cut and with random weights, and the head of its result."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

EMBEDDED = 1 / 128
"""Scale of embeddings in a model with a draft layer, in widths of the model: layers add more, the
wider they are."""
TEXT_MODELS = {"kimi_linear": "KimiLinearForCausalLM", "glm5_next_text": "Glm5NextForCausalLM"}
"""vLLM's class of a configuration's part about the language model, by its type."""


def draw_weights(model: Any) -> None:
    """Weights at the scale of an initialised model: with vLLM's dummies every logit is about 0.

    Each parameter's values depend on its name alone, so that two runs have the same; those of the
    vocabulary, of which each rank has other rows, on the rank too: equal rows would tie.

    Drafts of a random layer would all be wrong. So where a model has a draft layer its embeddings
    are large, and that layer passes them on: for both the next token is that of the last one in
    most cases, and in the others it is what the layers between add.
    """
    import torch

    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    has_draft_layer = bool(getattr(config, "num_nextn_predict_layers", 0))
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device=parameter.device)
        of_rank = rank if "lm_head" in name or "embed_tokens" in name else 0
        generator.manual_seed(zlib.crc32(name.encode()) + of_rank)
        x = parameter.data
        if name.endswith("A_log"):
            x.uniform_(1.0, 16.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(x).uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
            step.exp_()
            x.copy_(step + torch.log(-torch.expm1(-step)))
        elif "norm" in name:
            x.fill_(1.0)
        elif "conv1d" in name:
            x.uniform_(-0.5, 0.5, generator=generator)
        elif "bias" in name:
            x.zero_()
        elif x.is_floating_point():
            x.normal_(0.0, 0.02, generator=generator)
        if has_draft_layer and "embed" in name:
            x.mul_(EMBEDDED * x.shape[1] / 0.02)
        elif has_draft_layer and name.endswith("eh_proj.weight"):
            x[:, : len(x)].diagonal().add_(EMBEDDED * len(x))  # it reads [embedding, hidden state]


def copy_decode_weights(model: Any) -> None:
    """Make the copies of weights that vLLM's loaders would: Kimi-K3's decode kernel reads a
    transposed filter and an fp32 norm."""
    for layer in model.modules():
        filters = getattr(layer, "decode_conv1d_weight", None)
        norm = getattr(layer, "decode_norm_weight", None)
        if filters is not None:
            parts, width, channels = filters.shape
            filters.copy_(layer.conv1d.weight.data.view(parts, channels, width).transpose(1, 2))
        if norm is not None:
            norm.copy_(layer.o_norm.weight.data)


def with_dense_attention(config: Any) -> Any:
    """GLM's configuration without its indexer, and with 64 of a head's channels beside the latent,
    which dense MLA kernels expect: its class in transformers allows neither. Others stay."""
    text = config.get_text_config()
    if text.model_type == "glm5_next_text":
        sizes = {"qk_rope_head_dim": 64, "qk_nope_head_dim": text.qk_head_dim - 64}
        for name, value in {"index_topk": None, **sizes}.items():
            object.__setattr__(text, name, value)
    return config


def register_config(model: Path) -> None:
    """Have transformers read the configuration in a folder whose type it does not know, as the code
    that such a model is published with does."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    kind = json.loads((model / "config.json").read_text())["model_type"]
    if kind not in CONFIG_MAPPING:
        AutoConfig.register(kind, type("ReadConfig", (PretrainedConfig,), {"model_type": kind}))


def text_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration's part about the language model."""
    config = json.loads((args.config / "config.json").read_text())
    found: dict[str, Any] = config.get("text_config", config)
    return found


def model_directory(args: argparse.Namespace, *, only_text: bool = False) -> str:
    """The configuration with its first layers alone, and with as many heads of each attention layer
    and experts as are asked for, as a model to load. Without experts all layers are dense.

    Args:
        only_text: the language model as vLLM names it by itself.
    """
    config = json.loads((args.config / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = args.layers
    linear = text.get("linear_attn_config")
    if linear:
        kinds = ("full_attn_layers", "kda_layers")
        first = min(layer for kind in kinds for layer in linear[kind])  # some count from 0
        for kind in kinds:
            linear[kind] = [layer for layer in linear[kind] if layer - first < args.layers]
    if args.heads:
        text["num_attention_heads"] = text["num_key_value_heads"] = args.heads
        if linear:
            linear["num_heads"] = args.heads
    if args.experts:
        key = "n_routed_experts" if "n_routed_experts" in text else "num_experts"
        text[key] = args.experts
    elif args.experts == 0:
        text["first_k_dense_replace"] = args.layers + args.draft_layer
    if args.draft_layer:
        text["num_nextn_predict_layers"] = 1
    if only_text and text is not config:
        config = {**text, "architectures": [TEXT_MODELS[text["model_type"]]]}
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(config))
    return str(model)


def versions(engine: str) -> dict[str, str]:
    """GPU, versions and date, of a result's head."""
    import importlib

    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "engine": f"{engine} {importlib.import_module(engine).__version__}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def environment(args: argparse.Namespace, attention_backend: str | None) -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(": ")[1] for line in info if line.startswith("model name")]
    return {
        "cpu": cpu[0] if cpu else None,
        "cores": os.cpu_count(),
        "attention_backend": attention_backend,
        "config": args.config.name,
        **{
            name: getattr(args, name)
            for name in ("layers", "heads", "experts", "ranks", "variant", "drafts", "draft_layer")
        },
    }
