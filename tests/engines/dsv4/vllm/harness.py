"""The engine's own objects around one compressor of a small DeepSeek-V4, on the CPU."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype

from backend_core.target import KNOWN_TARGETS
from dsv4_backend import CompressorLayer, PagedPrefill, torch_step
from dsv4_backend import step as dsv4_step
from dsv4_backend.engines import vllm_compressor
from tests.dsv4.cases import Chunk, CompressorEngine, make_spec
from tests.engines.deepseek_v4 import model_directory
from tests.engines.vllm_process import builder_of, common_metadata, config_of, forward_pass


@functools.cache
def engine_config(flag: bool, drafts: int = 0) -> VllmConfig:
    """Of the small model; ``drafts`` of MTP for each token."""
    speculative = {"method": "mtp", "num_speculative_tokens": drafts}
    options = {"speculative_config": speculative} if drafts else {}
    family = "dsv4" if flag else None
    return config_of(model_directory(), family, kv_cache_dtype="fp8", **options)


def build(
    config: VllmConfig,
    cache_format: str,
    ratio: int = 4,
    cls: type | None = None,
    cache_dtype: str | None = None,
) -> Any:
    """A compressor as the attention layer or the indexer builds it, with random weights."""
    from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import DeepseekCompressor
    from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend

    registered = config.compilation_config.static_forward_context
    registered.clear()
    is_main = not cache_format.startswith("indexer")
    with set_default_torch_dtype(torch.bfloat16), set_current_vllm_config(config):
        if is_main:
            # the attention layer is its own record cache; these are what it says of it
            dtype = torch.bfloat16 if cache_format == "bf16_rows" else torch.uint8
            registered["layer"] = types.SimpleNamespace(
                kv_cache_dtype=cache_dtype
                or ("bfloat16" if cache_format == "bf16_rows" else "fp8_ds_mla"),
                kv_cache_torch_dtype=torch.float8_e4m3fn if cache_dtype == "fp8" else dtype,
                get_attn_backend=lambda: DeepseekV4FlashMLABackend,
            )
        else:
            DeepseekV4IndexerCache(132, torch.uint8, "layer", config.cache_config, 4)
        compressor = (cls or DeepseekCompressor)(
            vllm_config=config,
            compress_ratio=ratio,
            hidden_size=256,
            head_dim=512 if is_main else 128,
            rotate=True,
            prefix="layer.compressor",
            k_cache_prefix="layer",
            use_fp4_cache=cache_format.startswith("indexer_mxfp4"),
        )
    rng = torch.Generator().manual_seed(ratio)
    compressor.ape.data.copy_(torch.randn(compressor.ape.shape, generator=rng))
    compressor.norm.weight.data.copy_(0.5 + torch.rand(compressor.head_dim, generator=rng))
    return compressor


@functools.cache
def rotary(ratio: int) -> Any:
    """The rotary embedding that vLLM makes for layers of this ratio."""
    from vllm.models.deepseek_v4.common.rope import build_deepseek_v4_rope

    config = engine_config(flag=False)
    with set_current_vllm_config(config):
        return build_deepseek_v4_rope(
            config.model_config.hf_config,
            head_dim=512,
            rope_head_dim=64,
            max_position_embeddings=1024,
            compress_ratio=ratio,
        )


def on_kernels_of(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    """Let a GPU's kernels serve, which the interpreter runs."""
    for module in (dsv4_step, vllm_compressor):
        monkeypatch.setattr(module, "detect_target", lambda device: KNOWN_TARGETS[gpu])
    monkeypatch.setattr(torch_step, "step", None)


class Step:
    """A compressor bound to poisoned caches, and the steps that the engine runs it through."""

    def __init__(
        self, compressor: Any, cache_format: str, lengths: list[int], **changes: Any
    ) -> None:
        ratio = compressor.compress_ratio
        spec = make_spec(cache_format, ratio, rotate=False, rope_layout="split", **changes)
        self.compressor = compressor
        self.caches = CompressorEngine("paged", spec, lengths)
        self.layer = CompressorLayer(
            spec,
            compressor.ape.view(ratio, spec.halves, spec.head_dim),
            compressor.norm.weight,
            rotary(ratio).cos_sin_cache,
        )
        compressor.state_cache.kv_cache = self.caches.state
        cache, record = self.caches.cache, spec.record.record_bytes
        view = cache.as_strided(
            (cache.shape[0], spec.page_tokens, record), (cache.stride(0), record, 1)
        )
        registered = compressor._static_forward_context
        registered["layer"].kv_cache = (
            view.view(torch.bfloat16) if cache_format == "bf16_rows" else view
        )

    def run(
        self,
        config: VllmConfig,
        histories: list[torch.Tensor],
        chunks: list[Chunk],
        padding: int = 2,
        pads_requests: bool = True,
    ) -> Any:
        """One step over ``chunks``, padded as for a CUDA graph; returns its state metadata.

        Args:
            pads_requests: also what tells the tokens' requests; Model Runner V2 pads the slots
                alone outside of FULL graphs.
        """
        compressor = self.compressor
        plan = self.caches.prefill_plan(chunks)
        assert isinstance(plan, PagedPrefill)
        x = torch.cat([histories[r][a:b] for r, a, b in chunks]).float()
        x = torch.cat([x, torch.full((padding, x.shape[1]), torch.nan)])
        pad = torch.full((padding,), -1)
        positions = torch.cat([plan.positions, pad.clamp(min=0)])
        records = types.SimpleNamespace(slot_mapping=torch.cat([plan.slots, pad]))
        common = common_metadata(
            plan.query_starts,
            torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
            plan.block_table.clone(),
            torch.cat([plan.state_slots, pad]),
            num_actual_tokens=plan.num_tokens + (padding if pads_requests else 0),
        )
        metadata = builder_of(compressor.state_cache, config).build(0, common)
        attn_metadata = {compressor.state_cache.prefix: metadata, "layer": records}
        with forward_pass(config, attn_metadata, x.shape[0]):
            compressor(x, positions, rotary(compressor.compress_ratio))
        return metadata
