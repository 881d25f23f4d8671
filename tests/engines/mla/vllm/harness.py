"""vLLM's own objects around one MLA layer, on the CPU: configuration, layer, metadata builder."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.engines.vllm_process import common_metadata, config_of, forward_pass

RECALL = Path(__file__).parents[4] / "benchmarks" / "recall" / "checkpoint"
PAGES = 20
DEEPSEEK = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "vocab_size": 264,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
_names = itertools.count()


def deepseek(place: Path, version: int, **changes: Any) -> Path:
    """The folder of a tiny DeepSeek-V2 or V3."""
    architecture = {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
    }
    (place / "config.json").write_text(json.dumps({**architecture, **DEEPSEEK, **changes}))
    return place


def engine_config(model: Path = RECALL, family: str | None = "mla", **options: Any) -> Any:
    """The recall checkpoint's, or another model's."""
    return config_of(
        model, family, **{"max_model_len": 4096, "enable_prefix_caching": False, **options}
    )


class Prefill:
    """In the place of vLLM's prefill backends, which need a GPU: no test here has a prefill."""

    def __init__(self, **options: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "NONE"

    def clone(self) -> Prefill:
        return self

    def supports_quant_output(self, key: Any) -> bool:
        return False


def build_layer(config: VllmConfig, backend: type, heads: int) -> MLAAttention:
    """An MLA layer as a model builds it, with random weights."""
    name = f"model.layers.{next(_names)}.self_attn.attn"
    mla_attention.get_mla_prefill_backend = lambda config: Prefill
    with set_current_vllm_config(config):
        kv_b_proj = ColumnParallelLinear(512, heads * 256, bias=False, prefix=f"{name}.kv_b_proj")
        generator = torch.Generator().manual_seed(heads)
        weight = torch.randn(kv_b_proj.weight.shape, generator=generator, dtype=torch.float32)
        kv_b_proj.weight.data.copy_(weight * 512**-0.5)
        layer = MLAAttention(
            num_heads=heads,
            scale=192**-0.5,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            q_lora_rank=None,
            kv_lora_rank=512,
            kv_b_proj=kv_b_proj,
            cache_config=config.cache_config,
            prefix=name,
            attn_backend=backend,
        )
        layer.process_weights_after_loading(torch.bfloat16)
    return layer


def build_builder(config: VllmConfig, layer: MLAAttention, page_size: int) -> Any:
    spec = MLAAttentionSpec(
        block_size=page_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    builder = layer.attn_backend.get_builder_cls()
    with set_current_vllm_config(config):
        return builder(spec, [layer.layer_name], config, torch.device("cpu"))


@dataclasses.dataclass
class Runner:
    """The buffers that a model runner keeps, and the batches that it writes into them.

    A cache of `PAGES` pages whose rows that no request owns are NaN; page 0 is vLLM's null block.
    """

    page_size: int
    size: int = 8

    def __post_init__(self) -> None:
        self.cache = torch.full((PAGES, self.page_size, 576), float("nan"), dtype=torch.bfloat16)
        self.seq_lens = torch.zeros(self.size, dtype=torch.int32)
        self.block_table = torch.zeros(self.size, PAGES, dtype=torch.int32)
        self.bounds = torch.zeros(self.size + 1, dtype=torch.int32)

    def batch(
        self,
        lengths: Sequence[int],
        query_lens: Sequence[int] | None = None,
        padded: int | None = None,
        seed: int = 0,
    ) -> Any:
        """A batch of requests with so many tokens in the cache, drawn and stored here.

        Args:
            query_lens: tokens of each in this step, 1 by default.
            padded: requests of the CUDA graph that serves the batch; those added are empty.
        """
        query_lens = list(query_lens or [1] * len(lengths))
        requests = padded or len(lengths)
        tokens = requests * query_lens[0] if padded else sum(query_lens)
        generator = torch.Generator().manual_seed(seed)
        self.cache.fill_(float("nan"))
        self.block_table.fill_(0)
        free = iter((1 + torch.randperm(PAGES - 1, generator=generator)).tolist())
        for request, length in enumerate(lengths):
            for number in range(-(-length // self.page_size)):
                page = next(free)
                rows = min(self.page_size, length - number * self.page_size)
                self.block_table[request, number] = page
                drawn = torch.randn(rows, 576, generator=generator, dtype=torch.float32)
                self.cache[page, :rows] = drawn.bfloat16()
        self.seq_lens.fill_(0)
        self.seq_lens[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
        self.bounds.fill_(sum(query_lens))
        counts = torch.tensor([0, *query_lens], dtype=torch.int32)
        self.bounds[: len(lengths) + 1] = counts.cumsum(0, dtype=torch.int32)
        return common_metadata(
            self.bounds[: requests + 1],
            self.seq_lens[:requests],
            self.block_table[:requests],
            torch.zeros(tokens, dtype=torch.int64),
            is_prefilling=torch.zeros(requests, dtype=torch.bool),
        )


def queries(tokens: int, heads: int, seed: int = 1) -> torch.Tensor:
    """``[tokens, heads, 192]`` bf16, before W_UK."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 192, generator=generator, dtype=torch.float32).bfloat16()


def run_layer(
    layer: MLAAttention, config: VllmConfig, q: torch.Tensor, cache: torch.Tensor, metadata: Any
) -> torch.Tensor:
    """The layer's forward between its projections: ``[tokens, heads * 128]``."""
    tokens, heads = q.shape[:2]
    output = torch.full((tokens, heads * 128), float("nan"), dtype=q.dtype)
    latent = torch.zeros(tokens, 512, dtype=q.dtype)
    rope = torch.zeros(tokens, 1, 64, dtype=q.dtype)
    with forward_pass(config, {layer.layer_name: metadata}, tokens):
        layer.forward_impl(q, latent, rope, cache, metadata, output=output)
    return output
