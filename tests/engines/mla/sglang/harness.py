"""sglang's own objects around the MLA layers of a model, on the CPU.

Arguments, the pools of requests and of tokens, the attention backend and the batches are sglang's.
Only the model runner that holds them is ours, since sglang's starts process groups and asks for a
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import publish

from tests.engines.kda.sglang.harness import one_rank, server_args
from tests.engines.mla.sglang import flash_attention

REQUESTS, CONTEXT, PAGES = 8, 640, 24
LAYERS = 2


class Model(torch.nn.Module):
    """The layers of absorbed MLA of a model, and one of expanded MLA, which prompts run."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.absorbed = torch.nn.ModuleList(
            RadixAttention(heads, 576, 192**-0.5, 1, index, v_head_dim=512)
            for index in range(LAYERS)
        )
        self.expanded = RadixAttention(heads, 192, 192**-0.5, heads, 0, v_head_dim=128)


class Server:
    """sglang's FA3 backend for a model of MLA layers, with its pools.

    Rows of the cache that no request owns are NaN.
    """

    def __init__(
        self, *options: str, heads: int = 4, page_size: int = 64, dtype: Any = torch.bfloat16
    ) -> None:
        flash_attention.calls.clear()
        # what else keeps the states of a prefix needs a GPU or pages of one token
        self.args = server_args("--page-size", str(page_size), "--disable-radix-cache", *options)
        publish(self.args, role="test")
        one_rank()
        self.page_size = page_size
        self.model = Model(heads)
        self.requests = ReqToTokenPool(
            size=REQUESTS, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False
        )
        self.tokens = MLATokenToKVPool(
            size=PAGES * page_size,
            page_size=page_size,
            dtype=dtype,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        model_config = ModelConfig.from_server_args(self.args)
        model_config.context_len = CONTEXT
        self.runner = SimpleNamespace(
            device="cpu",
            server_args=self.args,
            model=self.model,
            model_config=model_config,
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.tokens,
            page_size=page_size,
            kv_cache_dtype=dtype,
            kv_cache_dtype_str="auto",
            attn_cp_size=1,
            sliding_window_size=None,
            attention_chunk_size=None,
            is_draft_worker=False,
            use_mla_backend=True,
            token_to_kv_pool_allocator=SimpleNamespace(),
            kv_index_translator=SimpleNamespace(
                is_translating=False, reads_are_translated=False, plan_for=lambda *a, **k: None
            ),
        )
        self.upstream = FlashAttentionBackend(self.runner)
        self.backend = self.upstream

    def fill(self, lengths: Sequence[int], seed: int = 0) -> None:
        """Draw requests of so many tokens, their last one not yet in the cache."""
        generator = torch.Generator().manual_seed(seed)
        self.lengths = list(lengths)
        for buffer in self.tokens.kv_buffer:
            buffer.fill_(float("nan"))
        # as much as a page may hold of any request
        self.requests.req_to_token.fill_(0)
        free = iter((1 + torch.randperm(PAGES - 1, generator=generator)).tolist())
        for request, length in enumerate(lengths):
            need = -(-length // self.page_size)
            pages = torch.tensor([next(free) for _ in range(need)])
            slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
            self.requests.req_to_token[request, :length] = slots[:length].int()
            for buffer in self.tokens.kv_buffer:
                rows = torch.randn(length - 1, 1, 576, generator=generator)
                buffer[slots[: length - 1]] = rows.to(buffer.dtype)
        self.tokens.kv_buffer[0][0] = self.tokens.kv_buffer[1][0] = 0  # the slot of padding

    def batch(self, padded: int = 0, mode: ForwardMode = ForwardMode.DECODE) -> Any:
        """The next decode step of the drawn requests; padded as sglang's graphs are."""
        count = len(self.lengths)
        size = max(count, padded)
        lengths = torch.ones(size, dtype=torch.int64)
        lengths[:count] = torch.tensor(self.lengths)
        indices = torch.zeros(size, dtype=torch.int64)
        indices[:count] = torch.arange(count)
        slots = torch.zeros(size, dtype=torch.int64)
        slots[:count] = self.requests.req_to_token[
            torch.arange(count), torch.tensor(self.lengths) - 1
        ].long()
        if padded:  # a request that is none: its table names the slot of padding
            indices[count:] = REQUESTS - 1
        return ForwardBatch(
            forward_mode=mode,
            batch_size=size,
            input_ids=torch.zeros(size, dtype=torch.int64),
            req_pool_indices=indices,
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            out_cache_loc=slots,
            seq_lens_sum=int(lengths.sum()),
            positions=lengths - 1,
        )

    def draw(self, tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
        """What a layer is called with: queries, and the new tokens of the cache."""
        generator = torch.Generator().manual_seed(seed)
        heads = self.model.absorbed[0].tp_q_head_num

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        k = normal(tokens, 1, 512)
        return {
            **{"q": normal(tokens, heads * 512), "k": k, "v": k},
            **{"q_rope": normal(tokens, heads, 64), "k_rope": normal(tokens, 1, 64)},
        }

    def run(
        self, batch: Any, drawn: dict[str, torch.Tensor], layer: int = 0, save: bool = True
    ) -> torch.Tensor:
        """A layer's attention, in which it also writes the new tokens."""
        with forward_context(ForwardContext(attn_backend=self.backend)):
            out: torch.Tensor = self.backend.forward(
                layer=self.model.absorbed[layer], forward_batch=batch, save_kv_cache=save, **drawn
            )
        return out
