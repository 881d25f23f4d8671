"""sglang's own compressor and attention-backend mixin over an engine in miniature, on the CPU.

Plans have sglang's types and the bytes of `tests.dsv4.cases`, whose state and cache are the pools:
sglang's planner and kernels are C++ that needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention.dsv4 import CompressorDecodePlan, CompressorPrefillPlan
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.dsv4.compressor import Compressor
from sglang.srt.layers.attention.dsv4.compressor_v2 import CompressorBackendMixin
from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool, KVAndScore
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import prepare_server_args

from dsv4_backend import CompressorLayer, CompressorSpec, RingDecode
from tests.dsv4.cases import POISON, Chunk, CompressorEngine, make_layer, make_spec
from tests.engines.deepseek_v4 import model_directory
from tests.engines.kda.sglang.harness import one_rank

HIDDEN = 64
STEP = "_forward_compress_all_in_one"


class States(CompressStatePool):
    """sglang's state pool over the engine's rows."""

    def __init__(self, engine: CompressorEngine) -> None:
        self.kv_score_buffer = KVAndScore(engine.state)


class Pool(DeepSeekV4TokenToKVPool):
    """sglang's token pool over the engine's pages."""

    uniform_fp8 = False

    def __init__(self, engine: CompressorEngine) -> None:
        self.engine = engine
        self.layer_mapping = {0: (engine.spec.compress_ratio, 0, object())}

    def get_attention_compress_states(self, layer_id: int) -> States:
        return States(self.engine)

    get_indexer_compress_states = get_attention_compress_states

    def get_index_k_with_scale_buffer(self, layer_id: int) -> torch.Tensor:
        return self.engine.cache

    get_extra_key_buffer = get_index_k_with_scale_buffer

    def get_index_k_page_size(self, compress_ratio: int = 4) -> int:
        return self.engine.spec.page_tokens

    get_extra_key_page_size = get_index_k_page_size

    def get_extra_key_layout(self, layer_id: int) -> Any:
        from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

        return KVLayout.V4


class Backend(CompressorBackendMixin):
    """The part of sglang's attention backend that compressors meet."""

    enable_deepseek_v4_fp4_indexer = False

    def __init__(self, engine: CompressorEngine) -> None:
        self.token_to_kv_pool = Pool(engine)


def make_compressor(spec: CompressorSpec) -> tuple[Any, CompressorLayer]:
    """sglang's module with random weights, loaded by its loaders, and the same as a definition."""
    layer = make_layer(spec)
    config = SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=spec.eps, qk_rope_head_dim=64)
    is_indexer = spec.head_dim == 128
    pairs = layer.rope_table.view(-1, 32, 2).contiguous()
    compressor = Compressor(
        config,
        layer_id=0,
        is_in_indexer=is_indexer,
        freqs_cis=torch.view_as_complex(pairs),
        compress_ratio=spec.compress_ratio,
        head_dim=spec.head_dim,
        rotate=is_indexer,
    )
    compressor.load_ape_weight(compressor.ape, layer.ape.flatten(1))
    compressor.norm.weight.data.copy_(layer.norm_weight)
    compressor.compute_kv_score = lambda x, forward_batch: x  # its product asks for a GPU
    return compressor, layer


class Served:
    """One compressor of a model that sglang serves with a command line."""

    def __init__(
        self,
        cache_format: str,
        ratio: int = 4,
        lengths: list[int] | None = None,
        *,
        flag: str | None = "dsv4",
        page_tokens: int = 4,
    ) -> None:
        rounding = "aiter" if cache_format == "indexer_mxfp4_planes" else "sglang"
        spec = make_spec(cache_format, ratio, rounding=rounding, page_tokens=page_tokens)
        self.engine = CompressorEngine("ring", spec, lengths or [33, 30])
        self.compressor, self.layer = make_compressor(spec)
        self.layer_id = 0
        full = Backend(self.engine)
        full.enable_deepseek_v4_fp4_indexer = cache_format.startswith("indexer_mxfp4")
        self.runner = make_runner(flag)
        self.backend = attention_registry.attn_backend_wrapper(self.runner, full)

    def use(self, pool: Any) -> None:
        """Work in sglang's own pool, whose tensors become the engine's."""
        layer = 1 if self.engine.spec.compress_ratio == 4 else 2
        self.compressor.layer_id = layer
        self.backend.token_to_kv_pool = pool
        self.layer_id = layer
        caches, states = self._memory(pool, layer)
        pages = [cache.view(torch.uint8).fill_(POISON).flatten(1) for cache in caches]
        self.engine.cache, self.engine.second_cache = (*pages, None)[:2]
        rows = states.kv_score_buffer.kv_score.fill_(torch.nan)
        spec = self.engine.spec
        self.engine.state = rows.view(-1, spec.compress_ratio, spec.row_width)

    def _memory(self, pool: Any, layer: int) -> tuple[list[torch.Tensor], Any]:
        """The tensors of a layer's records, and its states."""
        cache_format = self.engine.spec.cache_format
        if cache_format == "fp8_two_pools":
            caches = [pool.get_unified_kv(layer), pool.get_unified_kv_rope(layer)]
            return caches, pool.get_attention_compress_states(layer)
        if self.engine.spec.head_dim == 512:
            return [pool.get_extra_key_buffer(layer)], pool.get_attention_compress_states(layer)
        states = pool.get_indexer_compress_states(layer)
        if cache_format == "indexer_mxfp4_planes":
            payload = pool.get_index_k_fp4_payload_buffer(layer)
            return [payload, pool.get_index_k_fp4_scale_buffer(layer)], states
        return [pool.get_index_k_with_scale_buffer(layer)], states

    def run(self, histories: list[torch.Tensor], chunks: list[Chunk], padding: int = 2) -> None:
        """One step: decode where every chunk is one token, else prefill, whose plan has so many
        padded entries: in eager steps none."""
        ratio = self.engine.spec.compress_ratio
        is_decode = all(end - start == 1 for _, start, end in chunks)
        if is_decode:
            plan = self.engine.decode_plan([(r, end) for r, _, end in chunks])
            theirs = CompressorDecodePlan(ratio, plan.entries.view(torch.uint8))
        else:
            plan = self.engine.prefill_plan(chunks, padding)
            windows, writes = (x.view(torch.uint8) for x in (plan.windows, plan.writes))
            theirs = CompressorPrefillPlan(ratio, windows, writes)
        assert isinstance(plan, RingDecode) is is_decode
        slots = SimpleNamespace(**{f"c{ratio}_out_loc": plan.slots})
        slots.unified = slots  # where main records share a pool with the window's
        self.backend.forward_metadata = SimpleNamespace(
            core_metadata=slots,
            **{f"c{ratio}_compress_metadata": theirs},
        )
        x = torch.cat([histories[r][start:end] for r, start, end in chunks])
        mode = ForwardMode.DECODE if is_decode else ForwardMode.EXTEND
        batch = SimpleNamespace(forward_mode=mode)
        self.backend.forward_unified(x, batch, self.layer_id, self.compressor)


def real_pool(ratios: Sequence[int] = (0, 4, 128, 4), **options: Any) -> Any:
    """The pool that sglang allocates for layers of these ratios."""
    publish(server_args(), role="test")
    one_rank()
    return DeepSeekV4TokenToKVPool(
        max_num_reqs=8,
        swa_size=1024,
        c4_size=1024,
        c128_size=256,
        c4_state_pool_size=512,
        c128_state_pool_size=512,
        page_size=256,
        swa_page_size=256,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(ratios),
        **options,
    )


def server_args(*options: str) -> Any:
    """What sglang makes of a command line."""
    command = ["--model-path", model_directory(), "--device", "cpu", "--skip-tokenizer-init"]
    arguments = prepare_server_args([*command, "--dtype", "bfloat16", *options])
    arguments.resolve_once()
    return arguments


def make_runner(flag: str | None) -> Any:
    """What sglang's ModelRunner has of its arguments and its model."""
    arguments = server_args(*(() if flag is None else ("--attention-backend", flag)))
    return SimpleNamespace(
        server_args=arguments,
        model_config=ModelConfig.from_server_args(arguments),
        is_draft_worker=False,
        use_mla_backend=False,
    )
