"""Plans predicted from the inputs, as SpargeAttn does, and the attention mass that a plan keeps.

The threshold of a prediction is on pooled blocks and promises nothing about the attention itself:
a pooled sum of 0.95 was seen to keep 0.68 to 0.88 of it. ``recall`` measures what a plan keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.contracts import (
    check_scale,
    expect_device,
    expect_shape,
    expect_tensors,
    once,
    whole_number,
)
from backend_core.launch.streams import is_elsewhere, run_there
from block_sparse_backend import masks
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.contract import check_prediction, scale_of
from block_sparse_backend.plan import PlanPath, intervals
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice, ChoiceKind, PerHead
from block_sparse_backend.predict import PredictPath
from block_sparse_backend.selection import paths_on
from block_sparse_backend.spec import PredictSpec


def predict(
    q: Tensor,
    k: Tensor,
    *,
    cdf: PerHead | None = None,
    topk: PerHead | None = None,
    min_likeness: PerHead = -0.1,
    is_causal: bool = False,
    keep_first: bool = False,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 128,
    path: str | None = None,
) -> BlockPlan:
    """The blocks that most of the attention is predicted to lie in, for each head.

    What all keys share is subtracted from them, by which no softmax over keys changes. In Triton a
    tile or a block has no score, and is kept, where a channel of what is left of its mean key, or
    of its mean query times ``scale`` log2(e), is 65,504 or more.
    No value is read on the host, so the prediction can be captured in a CUDA graph.

    Args:
        q, k: [B, H, M, D] and [B, Hkv, N, D].
        cdf, topk, min_likeness, is_causal, keep_first: as in ``Choice``.
        scale: positive; default 1 / sqrt(D).
        block_m, block_n: queries in a tile and keys in a block; multiples of 16 in Triton.
        path: ``"torch"`` or ``"triton"``; by default the one for the device.

    Raises:
        ValueError: not exactly one of ``cdf`` and ``topk`` is given, or it is not in (0, 1], or has
            another number of heads; or the plan would have 2^31 blocks or more, or the path is
            another one, or q, k, the scale or a block's size is not as described.
    """
    expect_tensors(q=q, k=k)
    if is_elsewhere(q):
        return run_there(q, predict, locals())
    expect_device("k", k, q.device)
    choice = Choice(cdf, topk, min_likeness, is_causal, keep_first)
    scale = scale_of(q, scale)
    check_scale(scale)
    run = _predictor(q, k, choice.kind, block_m, block_n, path)
    choice.check_heads(q.shape[1])
    return run.select(run.pool(q, k), choice, scale)


@once
def _predictor(
    q: Tensor, k: Tensor, kind: ChoiceKind, block_m: int, block_n: int, path: str | None
) -> PredictPath:
    check_prediction(q, k, block_m, block_n)
    spec = PredictSpec.of(q, k, kind, (block_m, block_n), is_centred=kind.has_likeness)
    selection = paths_on(q.device, path, "predict").select("predict", spec, "q", q)
    run: PredictPath = selection.run(q.shape[0] * q.shape[1] * -(-q.shape[2] // block_m))
    return run


def from_map(
    kept: Tensor,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    keep_first: bool,
    path: str | None = None,
) -> BlockPlan:
    """The plan of a map of blocks: bool or int [B, H, tiles, blocks], kept where it is not 0.

    Args:
        lengths: queries and keys.
        sizes: queries in a tile and keys in a block.
        keep_first: keep the first block in any case.
        path: as in ``predict``.

    Raises:
        ValueError: the map has no head, or not the tiles and blocks of the lengths; or a size is
            wrong.
    """
    expect_tensors(kept=kept)
    names = ("queries", "keys", "queries in a tile", "keys in a block")
    for name, size, least in zip(names, (*lengths, *sizes), (0, 1, 1, 1), strict=True):
        whole_number(f"the number of {name}", size, least)
    tiles, blocks = (-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    expect_shape("kept", kept, ("B", "H", tiles, blocks))
    if not kept.shape[1]:
        raise ValueError(f"kept must have at least one head, got shape {list(kept.shape)}")
    selection = paths_on(kept.device, path, "plan").select("plan", None, "kept", kept)
    run: PlanPath = selection.run(kept.shape[0] * kept.shape[1] * kept.shape[2])
    return run.of_map(kept, lengths, sizes, keep_first)


def recall(plan: BlockPlan, q: Tensor, k: Tensor) -> Tensor:
    """The share of the attention that a plan keeps, mean over queries: float32 [B, H].

    It is exp(LSE over the plan - LSE over all keys that the plan's mask lets a query see), from two
    runs of the operator. The cost is that of dense attention.

    Args:
        plan: a plan of dense or causal attention that leaves blocks out.
        q, k: [B, H, M, D] and [B, Hkv, N, D].
    """
    b, h, m, _ = q.shape
    make = intervals.causal if plan.mask is masks.causal else intervals.dense
    whole = make(
        m, k.shape[2], h, batch=b, block_m=plan.block_m, block_n=plan.block_n, device=q.device
    )
    kept = block_sparse_attention(q, k, k, plan)[1]
    total = block_sparse_attention(q, k, k, whole)[1]
    sees = total != -torch.inf
    share = torch.where(sees, torch.exp(kept - torch.where(sees, total, 0.0)), 0.0)
    return share.sum(2) / sees.sum(2).clamp(min=1)
