"""Dense and block-sparse attention by cuDNN, FlashAttention-3 and FlexAttention.

FlashAttention-3 is ``_vllm_fa3_C.abi3.so`` of the wheel vllm 0.33.0 (vllm_flash_attn/), in the
folder that is given. Tensors are [1, H, L, D] views of [1, L, H, D] storage, as engines hold
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from block_sparse_backend.plan.block_plan import FULL, PARTIAL

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """torch's SDPA with its cuDNN backend."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def load_fa3(folder: Path) -> Attend:
    """FlashAttention-3 as vLLM calls it for one packed sequence.

    Raises:
        OSError: the library is not in the folder or does not load.
    """
    torch.ops.load_library(str(folder / "_vllm_fa3_C.abi3.so"))

    @functools.cache
    def offsets(length: int) -> Tensor:
        return torch.tensor([0, length], dtype=torch.int32, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        m, n = q.shape[0], k.shape[0]
        lengths = (offsets(m), offsets(n), None, None, None, m, n)
        absent = (None,) * 9
        window_and_rest = (is_causal, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None)
        scale = q.shape[-1] ** -0.5
        out = torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, None, None, *lengths, *absent, scale, *window_and_rest
        )
        return out[0].transpose(0, 1)[None]

    return attend


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(
    q: Tensor, k: Tensor, v: Tensor, kinds: Tensor | None, is_causal: bool
) -> Callable[[], Tensor]:
    """FlexAttention over the same blocks, whose mask is made here: ``kinds`` int8
    [H or 1, tiles, blocks] of 128 x 128."""
    mask = None if kinds is None else _block_mask(kinds, q.shape[2], k.shape[2], is_causal)
    is_grouped = q.shape[1] != k.shape[1]
    return lambda: _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=is_grouped)


def _block_mask(kinds: Tensor, m: int, n: int, is_causal: bool) -> object:
    from torch.nn.attention.flex_attention import BlockMask

    def rows(chosen: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.sort(chosen.int(), dim=-1, descending=True, stable=True).indices.int()
        return chosen.sum(-1).int()[None], index[None].contiguous()

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + (n - m)

    def everything(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j >= 0

    return BlockMask.from_kv_blocks(
        *rows(kinds == PARTIAL),
        *rows(kinds == FULL),
        BLOCK_SIZE=(128, 128),
        mask_mod=causal if is_causal else everything,
        seq_lengths=(m, n),
    )
