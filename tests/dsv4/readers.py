"""Records as AMD's attention kernels address them, put back into a plain page.

Each function follows the kernel that it names: which bytes a lane loads for which token. Nothing
here is shared with what writes the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Caches = Sequence[torch.Tensor]


def fp8_tiles(caches: Caches, tokens: int) -> torch.Tensor:
    """aiter's ``_gluon_deepgemm_fp8_paged_mqa_logits_preshuffle``, HiddenDim 128.

    Of a key and a channel it loads the byte ``channel % 16 + channel // 16 * 256 + key % 16 * 16 +
    key % KVBlockSize // 16 * 16 * 128`` of a page; the fp32 scales follow the page's keys.
    """
    (cache,) = caches
    plain = torch.zeros_like(cache)
    for key in range(tokens):
        for channel in range(128):
            at = channel % 16 + channel // 16 * 256 + key % 16 * 16 + key // 16 * 16 * 128
            plain[:, key * 128 + channel] = cache[:, at]
    plain[:, tokens * 128 : tokens * 132] = cache[:, tokens * 128 : tokens * 132]
    return plain


def mxfp4_tiles(caches: Caches, tokens: int) -> torch.Tensor:
    """aiter's ``_pa_mqa_logits_mxfp4_kernel`` with MFMA tiles of 32 keys, as it has for 32 heads or
    more: ``_shuffled_offsets``, and ``_scale_group_layout`` with SCALE_MODE 1.

    A lane has its codes in runs of 16 bytes, and of lane 32·l + n the scales l and l + 2 of key n
    are two bytes beside each other.
    """
    (cache,) = caches
    plain = torch.zeros_like(cache)
    for tile in range(tokens // 32):
        for n in range(32):
            key = 32 * tile + n
            for run in range(4):
                at = tile * 32 * 64 + run * 32 * 16 + n * 16
                plain[:, key * 64 + run * 16 :][:, :16] = cache[:, at : at + 16]
        for lane in range(64):
            half, key = lane // 32, 32 * tile + lane % 32
            at = tokens * 64 + tile * 32 * 4 + lane * 2
            for element in range(2):
                group = half + 2 * element
                plain[:, tokens * 64 + key * 4 + group] = cache[:, at + element]
    return plain


def mxfp4_planes(caches: Caches, tokens: int) -> torch.Tensor:
    """aiter's ``pa_mqa_logits_fp4_kernel`` (FlyDSL), kv_block_size 64 and head_dim 128.

    A wave scores a page: lane (D, T) loads, for each of four MFMA tiles, the 16 bytes of chunk D of
    key 16·tile + T, and one word with the scales of chunk D of its four keys.
    """
    payload, scales = caches
    assert tokens == 64
    plain = torch.zeros(payload.shape[0], 64 * 68, dtype=torch.uint8, device=payload.device)
    for lane in range(64):
        chunk, key_in_tile = lane >> 4, lane & 15
        word = scales[:, chunk * 64 + key_in_tile * 4 :][:, :4]
        for tile in range(4):
            key = 16 * tile + key_in_tile
            at = chunk * 64 * 16 + key * 16
            plain[:, key * 64 + chunk * 16 :][:, :16] = payload[:, at : at + 16]
            plain[:, 64 * 64 + key * 4 + chunk] = word[:, tile]
    return plain


def two_pools(caches: Caches, tokens: int) -> torch.Tensor:
    """aiter's ``mla_decode_fwd_v4_nm`` and sglang's copy of it: rows of 512 bytes, of which the
    MFMA takes a scale for every 32 channels, and rows of 64 bf16."""
    rows, rope = caches
    plain = torch.zeros(rows.shape[0], tokens * 584, dtype=torch.uint8, device=rows.device)
    for row in range(tokens):
        packed = rows[:, row * 512 : (row + 1) * 512]
        plain[:, row * 576 : row * 576 + 448] = packed[:, :448]
        plain[:, row * 576 + 448 : (row + 1) * 576] = rope[:, row * 128 : (row + 1) * 128]
        for block in range(0, 14, 2):
            assert torch.equal(packed[:, 448 + block], packed[:, 449 + block])
            plain[:, tokens * 576 + row * 8 + block // 2] = packed[:, 448 + block]
    return plain


READERS: dict[str, Callable[[Caches, int], torch.Tensor]] = {
    "indexer_fp8_tiles": fp8_tiles,
    "indexer_mxfp4_tiles": mxfp4_tiles,
    "indexer_mxfp4_planes": mxfp4_planes,
    "fp8_two_pools": two_pools,
}
