"""The configurations of a small DeepSeek-V4 and V4.1, for engines that need no weights."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

MODEL = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


V41 = {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 2, 3],
    "rms_norm_eps": 1e-20,
}
"""Fields of V4.1's language model that V4 lacks or has otherwise."""


@functools.cache
def model_directory(version: str = "v4") -> str:
    config = MODEL
    if version == "v41":
        text = {k: v for k, v in MODEL.items() if k not in ("architectures", "quantization_config")}
        config = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
        config |= {"torch_dtype": "bfloat16", "text_config": text | V41, "vision_config": {}}
    directory = tempfile.mkdtemp()
    (Path(directory) / "config.json").write_text(json.dumps(config))
    return directory


STEPS_C128 = [
    [(0, 0, 130), (1, 0, 120)],
    [(0, 130, 131), (1, 120, 127)],
    [(0, 131, 132), (1, 127, 128)],
    [(0, 132, 257), (1, 128, 129)],
]
"""Chunks (request, begin, end) of steps, prompts cut inside windows of 128 tokens."""
