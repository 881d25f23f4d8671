"""The small DeepSeek-V4 and V4.1 of `dsv4_engine_vllm` and `dsv4_engine_sglang`, and its prompts.

Shapes are those of the models where kernels fix them: 64 heads of 512 channels, an indexer of 64
heads that takes 512 compressed rows. V4 has ratios 4 and 128. V4.1 has ratios 1 and 2, each with a
layer that reads another one's rows, once by an indexer of its own and once by the other's lists.

What would let rounding choose tokens is avoided: experts are chosen by token (hash layers), or in
V4.1 each token takes all of them; the head can choose 16 tokens, and engines compute it in fp32; no
key takes most of an attention's weight.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

SIDES = ("upstream", "flag", "upstream-eager", "flag-eager")
MTP_SIDES = ("upstream-mtp", "flag-mtp")
DRAFTS = 2
HEADS = (8, 16, 32, 64)  # of the attention; groups of the output projection are as many at least
VOCABULARY, EXPERTS = 1024, 8
ANSWERS = 16  # tokens that the head can choose; with more, its two best are closer together
MODEL = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "num_hash_layers": 4,
    "num_nextn_predict_layers": 1,
}
V41_LAYERS = {
    "num_hidden_layers": 6,
    "compress_ratios": [0, 1, 1, 2, 2, 1],
    "kv_source_layer_ids": [1, 3, 5],
    "index_source_layer_ids": [1, 2, 3, 5],
    "num_experts_per_tok": EXPERTS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "v4": MODEL,
    "v41": {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "text_config": {**MODEL, **V41_LAYERS},
        "vision_config": {},
    },
}
BATCHED_TOKENS, MAX_LENGTH, REQUESTS, NEW_TOKENS = 2048, 6144, 64, 16


def model_directory(name: str, heads: int = 64) -> str:
    """A folder with the configuration of a model."""
    config = copy.deepcopy(CONFIGS[name])
    config.get("text_config", config)["num_attention_heads"] = heads
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers of several calls of a side's ``generate`` as one."""
    return {key: [x for answer in answers for x in answer[key]] for key in answers[0]}


def draw_weights(model: Any) -> None:
    """Weights by name alone, at a scale where attention has a say and no single record decides."""
    import torch

    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            x = parameter.data
            if not x.is_floating_point():  # experts by token, each other ones
                order = torch.rand(x.shape[0], EXPERTS, generator=generator, device=x.device)
                x.copy_(order.argsort(-1)[:, : x.shape[1]])
                continue
            x.copy_(torch.empty_like(x, dtype=torch.float32).normal_(generator=generator))
            if "norm" in name:
                x.mul_(0.1).add_(1.5 if "compressor.norm" in name or "kv_norm" in name else 1.0)
            elif name.endswith(("ape", "_base", "_scale", "attn_sink")):
                x.mul_(0.5)
            elif x.dim() > 1 and "embed" not in name:
                x.mul_(x.shape[-1] ** -0.5)
            if name == "lm_head.weight" or name.endswith("shared_head.head.weight"):
                x[ANSWERS:] = 0
        if hasattr(model, "process_weights_after_loading"):
            model.process_weights_after_loading()


def halve_rows(model: Any) -> None:
    """Compressed rows of half the size from now on: other tokens show that rows matter."""
    for name, parameter in model.named_parameters():
        if "compressor.norm" in name and "indexer" not in name:
            parameter.data.mul_(0.5)


def prompts() -> list[list[int]]:
    """64 prompts of 1 to 5,000 tokens."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 64) for _ in range(24)] + [rng.randint(65, 700) for _ in range(24)]
    lengths += [rng.randint(700, 2000) for _ in range(12)]
    lengths += [rng.randint(2100, 5000) for _ in range(4)]  # the indexer has to choose
    rng.shuffle(lengths)
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


def continued(batch: list[list[int]]) -> list[list[int]]:
    """The same prompts, each with a few tokens more: their beginnings lie in the prefix cache."""
    rng = random.Random(1)
    return [
        [*one, *(rng.randrange(1, VOCABULARY) for _ in range(1 + i % 9))]
        for i, one in enumerate(batch)
    ]
