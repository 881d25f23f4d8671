"""8-bit attention: the public operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backend_core.contracts import check_scale, expect_device, expect_shape, once
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.ready import layout_of
from block_sparse_backend.contract import (
    check_block_sparse,
    check_prediction,
    check_quantised,
    check_quantised_plan,
    check_tensors,
    empty_output,
    refuse_gradients,
    scale_of,
)
from block_sparse_backend.dense8 import Attend
from block_sparse_backend.masks import Mask
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice, ChoiceKind
from block_sparse_backend.predict import PredictPath
from block_sparse_backend.quantise import Quantise, QuantisePath
from block_sparse_backend.selection import Paths, default_blocks_int8, paths_on
from block_sparse_backend.spec import PredictSpec, QuantisedSpec, QuantiseSpec, SageMode

DEFAULT_MODE = SageMode()
PACKED_MODE = SageMode(fp8_values=False)
_EIGHT_BIT = ("quantise", "block_sparse_int8")
"""The operators of attention in 8 bits over a plan that there is."""


def quantised_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    *,
    scale: float | None = None,
    mode: SageMode = DEFAULT_MODE,
    path: str | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over a plan's blocks with INT8 q and k and e4m3 v.

    The mean of the keys is always subtracted before they are quantised, and the LSE is corrected
    for that exactly. The inputs are not changed. On normally distributed inputs the relative L2
    error is about 3.5e-2 with e4m3 values and 1e-2 with 16-bit values. The LSE is off by 0.02 to
    0.7, which matters if results are merged by it.

    Args:
        q, k, v: [B, H, M, D], [B, Hkv, N, D] twice; bf16 or fp16, D of 64 or 128.
        plan: of one batch of equal sequences.
        scale: positive; default 1 / sqrt(D).
        mode: how the inputs are quantised.
        path: ``"torch"`` (the products of the quantised inputs in fp32) or ``"triton"``; by
            default the one for the device.
        out: written, and returned.

    Returns:
        ``out`` [B, H, M, D] and natural ``lse`` [B, H, M]; a query that sees nothing has 0 and
        -inf.

    Raises:
        ValueError: an argument is not as described; nothing was written.
        LookupError: no path of the device's table serves the mode.
    """
    if is_elsewhere(q):
        return run_there(q, quantised_attention, locals())
    refuse_gradients(q, k, v)
    scale = scale_of(q, scale)
    layout = layout_of(q, k, v, out), scale, mode, path
    run: _Run | None = plan.prepared.get(layout)
    if run is None:
        paths = paths_on(q.device, path, *_EIGHT_BIT)
        run = plan.prepared.keep(layout, _prepare(q, k, v, out, plan, scale, mode, paths))
    out = empty_output(q, q.shape[3]) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel():
        x, _ = run.quantise(q, k, v, scale, None)
        run.attend(x, plan, scale, out, lse)
    return out, lse


class _Run(NamedTuple):
    """The functions that calls of one layout run."""

    quantise: Quantise
    attend: Attend


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    plan: BlockPlan,
    scale: float,
    mode: SageMode,
    paths: Paths,
) -> _Run:
    """Check a call and choose its paths."""
    check_block_sparse(q, k, v, plan, out, None)
    check_quantised_plan(q, plan)
    check_quantised(q, v, plan.block_n)
    check_scale(scale)
    spec = _spec_of(q, k, mode, (plan.block_m, plan.block_n), plan.mask)
    return _run_of(q, k, v, spec, len(plan.work), paths, None, None)


def _spec_of(
    q: Tensor, k: Tensor, mode: SageMode, blocks: tuple[int, int], mask: Mask
) -> QuantisedSpec:
    heads = q.shape[1]
    return QuantisedSpec(mode, heads, heads // k.shape[1], q.shape[3], *blocks, mask)


@once
def _run_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: QuantisedSpec,
    programs: int,
    paths: Paths,
    kind: ChoiceKind | None,
    key_blocks: Tensor | None,
) -> _Run:
    """Args:
    kind: of a prediction, for which the quantiser sums up blocks.
    key_blocks: of the plan of packed sequences.
    """
    asked = QuantiseSpec(spec.mode, block_n=spec.block_n)
    if kind is not None:
        asked = QuantiseSpec(spec.mode, spec.block_m, spec.block_n, True, kind.has_likeness)
    quantise: QuantisePath = paths.select("quantise", asked, "q", q).run(programs)
    attend: Attend = paths.select("block_sparse_int8", spec, "q", q).run(programs)
    return _Run(quantise(q, k, v, key_blocks), attend)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    lengths: tuple[int, int],
    *,
    is_causal: bool = False,
    scale: float | None = None,
    path: str | None = None,
) -> Tensor:
    """``quantised_attention`` of each sequence of a packed batch, dense or causal.

    Values stay in 16 bits, as in the original of ``sageattn_varlen``. It is one plan, one
    quantisation and one launch, of sizes that follow from T and S alone, and kernels read nothing
    on the host.

    Args:
        q: [1, H, T, D]; k, v: [1, Hkv, T, D]: the sequences one after another.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [S + 1], where they begin and end.
        lengths: the most queries and the most keys of a sequence; what is beyond is left out.
        scale, path: as in ``quantised_attention``.

    Returns:
        [1, H, T, D]; 0 for queries that see nothing, and of no sequence.

    Raises:
        ValueError: an argument is not as described; nothing was written.
        LookupError: no path of the device's table serves the call.
    """
    if is_elsewhere(q):
        return run_there(q, packed_attention, locals())
    refuse_gradients(q, k, v)
    check_tensors(q, k, v, None, None)
    expect_shape("q", q, (1, "H", "T", "D"))
    expect_device("cu_seqlens_q", cu_seqlens_q, q.device)
    scale = scale_of(q, scale)
    check_scale(scale)
    out = torch.zeros_like(q)
    most = [min(n, x.shape[2]) for n, x in zip(lengths, (q, k), strict=True)]
    if 0 in most:
        return out
    block_m, block_n = default_blocks_int8(q.device)
    check_quantised(q, v, block_n)
    paths = paths_on(q.device, path, "plan", *_EIGHT_BIT)
    plan = intervals.packed(
        (cu_seqlens_q, cu_seqlens_k),
        (most[0], most[1]),
        (q.shape[2], k.shape[2]),
        q.shape[1],
        (block_m, block_n),
        is_causal,
        paths,
    )
    spec = _spec_of(q, k, PACKED_MODE, (block_m, block_n), plan.mask)
    run = _run_of(q, k, v, spec, len(plan.work), paths, None, plan.key_blocks)
    x, _ = run.quantise(q, k, v, scale, plan)
    run.attend(x, plan, scale, out, None)
    return out


def predicted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    *,
    scale: float | None = None,
    mode: SageMode = DEFAULT_MODE,
    blocks: tuple[int, int] | None = None,
    path: str | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, BlockPlan]:
    """``quantised_attention`` over the blocks that ``plan.predicted.predict`` would keep.

    The kernels that quantise queries and keys also compute their means, so the prediction reads no
    tokens itself. It can be captured in a CUDA graph together with the attention.

    Args:
        q, k, v, scale, mode, path, out: as in ``quantised_attention``.
        choice: which blocks are kept.
        blocks: queries in a tile and keys in a block; default ``default_blocks_int8``.

    Returns:
        ``out`` and ``lse`` as ``quantised_attention`` does, and the plan.

    Raises:
        ValueError: an argument is not as described; nothing was written.
        LookupError: no path of the device's table serves the mode.
    """
    if is_elsewhere(q):
        return run_there(q, predicted_attention, locals())
    refuse_gradients(q, k, v)
    scale = scale_of(q, scale)
    predict, run = _prepared_prediction(q, k, v, out, choice.kind, scale, mode, blocks, path)
    choice.check_heads(q.shape[1])
    x, pooled = run.quantise(q, k, v, scale, None)
    assert pooled is not None
    plan = predict.select(pooled, choice, scale)
    out = empty_output(q, q.shape[3]) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run.attend(x, plan, scale, out, lse)
    return out, lse, plan


@once
def _prepared_prediction(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    kind: ChoiceKind,
    scale: float,
    mode: SageMode,
    blocks: tuple[int, int] | None,
    path: str | None,
) -> tuple[PredictPath, _Run]:
    """The functions for a call, after a check of its arguments."""
    check_tensors(q, k, v, out, None)
    blocks = default_blocks_int8(q.device) if blocks is None else blocks
    check_quantised(q, v, blocks[1])
    check_prediction(q, k, *blocks)
    check_scale(scale)
    programs = q.shape[0] * q.shape[1] * -(-q.shape[2] // blocks[0])
    spec = _spec_of(q, k, mode, blocks, kind.mask)
    asked = PredictSpec.of(q, k, kind, blocks, is_centred=True)
    paths = paths_on(q.device, path, "predict", *_EIGHT_BIT)
    predict: PredictPath = paths.select("predict", asked, "q", q).run(programs)
    return predict, _run_of(q, k, v, spec, programs, paths, kind, None)
