"""vLLM's own objects around one attention layer of DeepSeek-V4 or V4.1, on the CPU.

Layer, metadata builders and index lists are vLLM's. V4.1's layer reads the rows of another one,
which is built before it. Not vLLM's are the indexer's choice, which is drawn, FlashMLA itself, of
which no build runs here, and the writer of the caches' records: of vLLM's, which the interpreter
runs row by row, one test shows that it writes the same bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype

from mla_backend import reference_sparse_mla as reference
from mla_backend.testing.sparse_mla_cases import write_records
from tests.engines.deepseek_v4 import model_directory
from tests.engines.mla.flash import FlashMla
from tests.engines.vllm_process import builder_of, common_metadata, config_of, forward_pass

WINDOW, TOPK, PAGES = 128, 64, 24
MAX_LENGTH, MAX_TOKENS = 1024, 2048
SIZES = {"v4": (256, 64), "v41": (64, 32)}
"""By model, tokens of a block and of a window's page, as vLLM chooses them on Hopper."""
LAYERS = {"v4": {1: (0,), 4: (1,), 128: (2,)}, "v41": {0: (0,), 2: (1, 2), 1: (3, 4)}}
"""By model and ratio, the layers that are built: the last is the one that runs."""


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> FlashMla:
    """What a layer and its metadata ask of a Hopper GPU; returns what stands for FlashMLA."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import sparse_swa
    from vllm.v1.worker import workspace

    modules = [flashmla_of(version) for version in SIZES]
    kernel = FlashMla()
    monkeypatch.setattr(torch.cuda, "Event", lambda *args, **options: None)
    is_hopper = classmethod(lambda cls, family, *_: family == 90)
    monkeypatch.setattr(type(current_platform), "is_device_capability_family", is_hopper)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(sparse_swa, "get_mla_metadata", lambda: (sparse_swa.FlashMLASchedMeta(),))
    for flashmla in modules:
        monkeypatch.setattr(flashmla, "compute_fp8_einsum_recipe", lambda *_: (None, False))
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
            monkeypatch.setattr(flashmla, name, kernel)
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    return kernel


def flashmla_of(version: str) -> Any:
    """vLLM's module of the layers that call FlashMLA."""
    return importlib.import_module(f"vllm.models.deepseek_{version}.nvidia.flashmla")


def engine_config(
    heads: int, version: str = "v4", *, flag: bool = True, drafts: int = 0, **options: Any
) -> Any:
    """The configuration that vLLM makes of its arguments, for weights in bf16."""
    speculative = {"method": "mtp", "num_speculative_tokens": drafts}
    config = config_of(
        model_directory(version),
        "dsv4" if flag else None,
        max_num_seqs=128,
        max_num_batched_tokens=MAX_TOKENS,
        kv_cache_dtype="fp8",
        hf_overrides={"num_attention_heads": heads},
        **({"speculative_config": speculative} if drafts else {}),
        **options,
    )
    config.quant_config = None  # fp8 products need a GPU
    return config


def build_layer(config: Any, ratio: int) -> Any:
    """The attention layer of the model that has this ratio, with random sinks."""
    version = version_of(config)
    config.compilation_config.static_forward_context.clear()
    chosen = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
    # on a GPU vLLM chooses the size of blocks once the model is built
    config.cache_config.block_size = 16
    with set_default_torch_dtype(torch.bfloat16), set_current_vllm_config(config):
        for number in LAYERS[version][ratio]:
            layer = flashmla_of(version).DeepseekV4FlashMLAAttention(
                config, f"model.layers.{number}.self_attn", topk_indices_buffer=chosen
            )
    config.cache_config.block_size = SIZES[version][0]
    assert layer.compress_ratio == ratio
    generator = torch.Generator().manual_seed(ratio)
    layer.attn_sink.data[: layer.n_local_heads] = 2 * torch.randn(
        layer.n_local_heads, generator=generator
    )
    return layer


def version_of(config: Any) -> str:
    return "v41" if config.model_config.hf_config.model_type == "deepseek_v41" else "v4"


class Batches:
    """One layer, its caches, its builders, the runner's buffers, and the batches written there.

    Caches that no request owns hold NaN; block 0 is vLLM's null block. Buffers keep their
    addresses from batch to batch.

    Attributes:
        owner: the layer whose cache has the compressed rows: itself, or in V4.1 another one.
        insert: writes rows ``[n, 512]`` to slots of a cache, called as vLLM's operator is.
    """

    def __init__(self, config: Any, layer: Any, requests: int = 8) -> None:
        self.config, self.layer = config, layer
        self.insert = insert_records
        ratio, version = layer.compress_ratio, version_of(config)
        block, self.swa_page = SIZES[version]
        self.has_rows = ratio > (1 if version == "v4" else 0)
        self.swa_cache = _pages(PAGES * 4, self.swa_page)
        self.cache = _pages(PAGES, max(1, block // max(1, ratio)))
        layer.swa_cache_layer.kv_cache = self.swa_cache
        self.owner = owner = layer
        if self.has_rows and version == "v41":
            context = config.compilation_config.static_forward_context
            self.owner = owner = context[layer.compressed_cache_prefix]
            assert owner is not layer
        if self.has_rows:
            owner.kv_cache = self.cache
        self.swa_table = torch.zeros(requests, MAX_LENGTH // self.swa_page, dtype=torch.int32)
        self.table = torch.zeros(requests, MAX_LENGTH // block, dtype=torch.int32)
        self.seq_lens = torch.zeros(requests, dtype=torch.int32)
        self.bounds = torch.zeros(requests + 1, dtype=torch.int32)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        self.slots = torch.full((MAX_TOKENS,), -1, dtype=torch.int64)
        self.q = torch.zeros(MAX_TOKENS, layer.padded_heads, 512, dtype=torch.bfloat16)
        self.out = torch.zeros_like(self.q)
        self.builders = {
            layer.swa_cache_layer.prefix: builder_of(layer.swa_cache_layer, config),
            **({owner.prefix: builder_of(owner, config)} if self.has_rows else {}),
        }

    def write(self, chunks: Sequence[tuple[int, int]], seed: int) -> int:
        """A batch of requests, each with the tokens ``begin`` to ``end`` of its own: draws and
        stores all rows up to ``end``, queries and the indexer's choice.

        Returns:
            The number of query tokens.
        """
        ratio = self.layer.compress_ratio
        generator = torch.Generator().manual_seed(seed)
        for memory in (self.swa_cache, self.cache):
            _memory(memory).fill_(0xFF)
        self.swa_table.zero_()
        self.table.zero_()
        swa_free = iter((1 + torch.randperm(PAGES * 4 - 1, generator=generator)).tolist())
        free = iter((1 + torch.randperm(PAGES - 1, generator=generator)).tolist())

        def store(cache: torch.Tensor, table: torch.Tensor, rows: int, pages: Any) -> None:
            size = cache.shape[1]
            for number in range(-(-rows // size)):
                table[number] = next(pages)
            at = torch.arange(rows)
            slots = table[at // size].long() * size + at % size
            k = (0.1 * torch.randn(rows, 512, generator=generator)).bfloat16()
            # channels of very different size, so that another's scale shows
            k[:, :448] *= torch.exp2(torch.arange(7.0) - 3).repeat_interleave(64).bfloat16()
            k = reference.read_records(write_records(k[:, None])).squeeze(1).bfloat16()
            self.insert(k, _memory(cache), slots, block_size=size)

        for request, (_, end) in enumerate(chunks):
            store(self.swa_cache, self.swa_table[request], end, swa_free)
            if self.has_rows:
                store(self.cache, self.table[request], end // ratio, free)
        counts = torch.tensor([end - begin for begin, end in chunks])
        tokens = int(counts.sum())
        self.seq_lens.zero_()
        self.seq_lens[: len(chunks)] = torch.tensor([end for _, end in chunks])
        self.bounds.fill_(tokens)
        self.bounds[0] = 0
        self.bounds[1 : len(chunks) + 1] = counts.cumsum(0)
        where = torch.cat([torch.arange(begin, end) for begin, end in chunks])
        self.positions[:tokens] = where
        self.slots.fill_(-1)
        owner = torch.arange(len(chunks)).repeat_interleave(counts)
        self.slots[:tokens] = (
            self.swa_table[owner, where // self.swa_page].long() * self.swa_page
            + where % self.swa_page
        )
        live = self.layer.n_local_heads
        drawn = torch.randn(tokens, live, 512, generator=generator)
        self.q.zero_()[:tokens, :live] = 4 * drawn.bfloat16()
        chosen = self.layer.topk_indices_buffer.fill_(-1)
        for token, position in enumerate(where.tolist()):
            there = min((position + 1) // max(ratio, 1), TOPK)
            order = torch.randperm(max((position + 1) // max(ratio, 1), 1), generator=generator)
            chosen[token, :there] = order[:there].int()
        self.chunks = list(chunks)
        return tokens

    def metadata(self, requests: int, tokens: int, *, capture: bool = False) -> dict[str, Any]:
        """As the builders of both caches make it, for a batch padded to so many of both."""
        made = {}
        for prefix, builder in self.builders.items():
            table = self.swa_table if prefix.endswith("swa_cache") else self.table
            common = common_metadata(
                self.bounds[: requests + 1],
                self.seq_lens[:requests],
                table[:requests],
                self.slots[:tokens],
                max_seq_len=MAX_LENGTH,
                positions=self.positions[:tokens],
            )
            with set_current_vllm_config(self.config):
                made[prefix] = (
                    builder.build_for_cudagraph_capture(common)
                    if capture
                    else builder.build(0, common)
                )
        return made

    def forward(self, metadata: dict[str, Any], tokens: int) -> torch.Tensor:
        """The layer's attention between its projections, ``[tokens, heads, 512]``."""
        self.out.fill_(float("nan"))
        out = self.out[:tokens]
        with forward_pass(self.config, metadata, tokens):
            self.layer.forward_mqa(
                self.q[:tokens], self.q[:tokens, 0], self.positions[:tokens], out
            )
        return out

    def run(self, chunks: Sequence[tuple[int, int]], seed: int = 0) -> torch.Tensor:
        tokens = self.write(chunks, seed)
        return self.forward(self.metadata(len(chunks), tokens), tokens)

    def expected(self) -> torch.Tensor:
        """The batch's attention in float64 from the caches' bytes, live heads alone."""
        layer, live = self.layer, self.layer.n_local_heads
        ratio, size = layer.compress_ratio, self.swa_page
        window = reference.read_records(self.swa_cache).flatten(0, 1)
        compressed = reference.read_records(self.cache).flatten(0, 1)
        wanted, token = [], 0
        for request, (begin, end) in enumerate(self.chunks):
            for position in range(begin, end):
                at = torch.arange(max(0, position + 1 - WINDOW), position + 1)
                slots = self.swa_table[request, at // size].long() * size + at % size
                rows = [window[slots]]
                if self.has_rows:
                    at = torch.arange((position + 1) // ratio)
                    if ratio <= 4:
                        chosen = layer.topk_indices_buffer[token]
                        at = chosen[chosen >= 0].long()
                    page = self.cache.shape[1]
                    rows.append(
                        compressed[self.table[request, at // page].long() * page + at % page]
                    )
                k = torch.cat(rows)
                q = self.q[token, :live].double()
                s = layer.scale * q @ k.T
                sink = layer.attn_sink.data[:live].double()[:, None]
                weights = torch.softmax(torch.cat([s, sink], 1), 1)[:, :-1]
                wanted.append(weights @ k)
                token += 1
        return torch.stack(wanted)


def insert_records(
    k: torch.Tensor, memory: torch.Tensor, slots: torch.Tensor, *, block_size: int
) -> None:
    """The records of rows that they hold exactly, into pages of so many rows."""
    records = write_records(k[:, None])
    bytes_of = records.as_strided((len(k), 584), (records.stride(0), 1))
    page, row = slots // block_size, slots % block_size
    ends = block_size * 576, block_size * 584
    memory[:, : ends[0]].unflatten(1, (block_size, 576))[page, row] = bytes_of[:, :576]
    memory[:, ends[0] : ends[1]].unflatten(1, (block_size, 8))[page, row] = bytes_of[:, 576:]


def _pages(count: int, size: int) -> torch.Tensor:
    """Pages of records as vLLM strides them, ``[count, size, 584]``."""
    memory = torch.full((count, -(-size * 584 // 576) * 576), 0xFF, dtype=torch.uint8)
    return memory.as_strided((count, size, 584), (memory.stride(0), 584, 1))


def _memory(cache: torch.Tensor) -> torch.Tensor:
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1))
