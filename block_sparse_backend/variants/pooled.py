"""The mean tokens of blocks of queries and keys, which a prediction scores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from block_sparse_backend.kernels import predict as kernels
from block_sparse_backend.prepared import prepared
from block_sparse_backend.variants.column_stats import column_mean

_STEP = 16  # tokens that a program of one warp holds


@dataclass(frozen=True)
class Pooled:
    """Sums over blocks of tokens, made by ``pool`` or on the way by ``sage.quantise``.

    Attributes:
        q_sums: float32 [B, H, tiles, D], over ``block_m`` queries each.
        k_sums: float32 [B, Hkv, blocks, D], over ``block_n`` keys each.
        q_likeness, k_likeness: float32 [B, H, tiles] and [B, Hkv, blocks], the mean cosine of all
            pairs of a block's tokens (keys without their mean); ``None`` where nobody asks.
        lengths: of queries and keys.
        is_centred: what all keys share has been taken out of ``k_sums``.
    """

    q_sums: Tensor
    k_sums: Tensor
    q_likeness: Tensor | None
    k_likeness: Tensor | None
    lengths: tuple[int, int]
    block_m: int
    block_n: int
    is_centred: bool = True

    @staticmethod
    def empty(q: Tensor, k: Tensor, block_m: int, block_n: int, has_likeness: bool) -> Pooled:
        """Room for the blocks of [B, H, M, D] and [B, Hkv, N, D]."""

        def make(x: Tensor, block: int) -> tuple[Tensor, Tensor | None]:
            b, h, length, d = x.shape
            shape = (b, h, -(-length // block))
            new = torch.empty(*shape, d, dtype=torch.float32, device=x.device)
            return new, new.new_empty(shape) if has_likeness else None

        q_sums, q_likeness = make(q, block_m)
        k_sums, k_likeness = make(k, block_n)
        lengths = (q.shape[2], k.shape[2])
        return Pooled(q_sums, k_sums, q_likeness, k_likeness, lengths, block_m, block_n)


def pool(
    q: Tensor,
    k: Tensor,
    blocks: tuple[int, int],
    has_likeness: bool,
) -> Pooled:
    """Pool [B, H, M, D] and [B, Hkv, N, D], the keys without their mean.

    Without likenesses the kernels read the keys once, and leave it to the scores to take out what
    all keys share.

    Args:
        blocks: queries and keys of a block.
        has_likeness: ask for likenesses.
    """
    x = Pooled.empty(q, k, *blocks, has_likeness)
    k_mean = column_mean(k) if has_likeness else None
    _pool(q, None, x.q_sums, x.q_likeness, x.block_m)
    _pool(k, k_mean, x.k_sums, x.k_likeness, x.block_n)
    return x if has_likeness else dataclasses.replace(x, is_centred=False)


def _pool(
    x: Tensor, mean: Tensor | None, sums: Tensor, likeness: Tensor | None, block: int
) -> None:
    b, h, _, d = x.shape
    flags = {"HAS_MEAN": mean is not None, "HAS_LIKENESS": likeness is not None}
    sizes = {"HEADS": h, "D": d, "BLOCK": block, "STEP": _STEP}
    prepared(kernels.pool_kernel, 1, "x", **sizes, **flags).launch(
        (sums.shape[2] * b * h, 1, 1),
        x_ptr=x,
        mean_ptr=sums if mean is None else mean,
        sums_ptr=sums,
        likeness_ptr=sums if likeness is None else likeness,
        length=x.shape[2],
        blocks=sums.shape[2],
    )


def pool_in_torch(q: Tensor, k: Tensor, blocks: tuple[int, int]) -> Pooled:
    """`pool` in torch, always with likenesses."""

    def make(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
        b, h, length, d = x.shape
        padded = torch.nn.functional.pad(x, (0, 0, 0, -length % block)).view(b, h, -1, block, d)
        count = (length - torch.arange(padded.shape[2], device=x.device) * block).clamp(max=block)
        unit = padded / padded.norm(dim=-1, keepdim=True).clamp(min=1e-10)
        return padded.sum(3), (unit.sum(3) / count[:, None]).square().sum(-1)

    k = k.float() - k.float().mean(2, keepdim=True)
    q_sums, q_likeness = make(q.float(), blocks[0])
    k_sums, k_likeness = make(k, blocks[1])
    lengths = (q.shape[2], k.shape[2])
    return Pooled(q_sums, k_sums, q_likeness, k_likeness, lengths, *blocks)
