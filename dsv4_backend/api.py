"""The public operators: check the contract, find the kernels, run them.

Nothing here reads a device value on the host, so every operator can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from backend_core.target import Target, detect_target
from dsv4_backend import compressor, validation
from dsv4_backend.spec import CompressorLayer, real_rope_table
from dsv4_backend.step_plan import (
    DecodePlan,
    PrefillPlan,
    RowPlan,
    SeqLens,
)


def compress_norm_rope_hadamard_(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    plan: SeqLens | RowPlan,
    *,
    head_dim: int,
    compress_ratio: int,
    rotate: bool,
    target: Target | None = None,
) -> None:
    """RMSNorm, RoPE and Walsh-Hadamard rotation of pooled rows, in place, in one launch.

    Computed in fp32 and rounded once, to the dtype of ``kv``. Replaces sglang's
    ``hip_compress_fused_norm_rope_hadamard_inplace`` and, with ``rotate=False``,
    ``hip_compress_fused_norm_rope_inplace``.

    Args:
        kv: [rows, head_dim] fp32 or bf16, last dimension contiguous, any row stride; rewritten.
        weight: [head_dim] fp32 or bf16, of the RMSNorm.
        eps: added to the mean square.
        freqs_cis: complex64 [positions, 32], or real [positions, 64] interleaved (cos, sin).
        plan: which rows, and where their sequences stand. Only rows that end a window are touched;
            their position is that of the window's first token.
        head_dim: 128 or 512.
        compress_ratio: 4 or 128.
        rotate: multiply by H / sqrt(head_dim) at the end.
        target: the processor to choose kernels for, by default that of ``kv``.

    Raises:
        ValueError: an argument breaks this contract; nothing was written.
        LookupError: there are no kernel paths for the target.
    """
    table = real_rope_table(freqs_cis)
    validation.check_in_place(kv, weight, eps, table, plan, head_dim, compress_ratio, rotate)
    target = target or detect_target(kv.device)
    compressor.run_in_place(target, kv, weight, eps, table, plan, compress_ratio, rotate)


def compress_decode_(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    plan: DecodePlan,
    *,
    target: Target | None = None,
) -> None:
    """One new token for each request: its state row and, where a window ends, its cached row.

    Args:
        layer: the compressor.
        kv_score: [N, 2·C·d] fp32 or bf16, rows [kv | score] without APE; any row stride, and more
            rows than the plan has are left alone.
        state: [pages, rows, 2·C·d] fp32 or bf16; the plan says how many rows a page has. Written
            at the plan's rows.
        cache: [pages, page bytes] uint8, pages a multiple of 4 bytes apart. Written at the plan's
            slots in ``layer.spec.cache_format``.
        plan: the step.
        target: the processor to choose kernels for, by default that of ``kv_score``.

    Raises:
        ValueError: an argument breaks this contract; nothing was written.
        LookupError: there are no kernel paths for the target.
    """
    compressor.run_decode((layer, kv_score, state, cache), plan, target)


def compress_decode_pair_(
    main: tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor],
    indexer: tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor],
    main_plan: DecodePlan,
    indexer_plan: DecodePlan,
    *,
    target: Target | None = None,
) -> None:
    """``compress_decode_`` for the main and the indexer compressor of one C4 layer, in one launch.

    Args:
        main, indexer: (layer, kv_score, state, cache) of each. They share ratio 4, rounding, fp8
            flavour, RoPE table, eps and, if paged, the plan's ``requests``.
        main_plan, indexer_plan: of one kind and length; sglang passes one plan twice.
        target: as in ``compress_decode_``.

    Raises:
        ValueError: an argument breaks this contract; nothing was written.
        LookupError: there are no kernel paths for the target.
    """
    compressor.run_decode_pair((main, indexer), (main_plan, indexer_plan), target)


def compress_prefill_(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    plan: PrefillPlan,
    *,
    target: Target | None = None,
) -> None:
    """Chunks of requests: the cached row of every window that ends in them, then the state rows.

    A window's rows come from ``kv_score`` where they are in the chunk and from ``state`` before
    it, so that chunks may be cut anywhere.

    Args:
        layer, state, cache, target: as in ``compress_decode_``.
        kv_score: [T, 2·C·d] fp32 or bf16, requests one after another.
        plan: the step.

    Raises:
        ValueError: an argument breaks this contract; nothing was written.
        LookupError: there are no kernel paths for the target.
    """
    compressor.run_prefill((layer, kv_score, state, cache), plan, target)


def warm_up(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    plan: DecodePlan | PrefillPlan,
    *,
    target: Target | None = None,
) -> None:
    """Compile, at model load, what ``compress_decode_`` or ``compress_prefill_`` may launch.

    Nothing is launched. Later calls find their kernels if their tensors agree with these in dtype,
    in strides and in 16-byte alignment; the number of tokens does not matter.

    Args:
        layer, kv_score, state, cache, plan, target: as in the operator; the plan's kind chooses it.

    Raises:
        ValueError: an argument breaks the operator's contract.
        LookupError: there are no kernel paths for the target.
    """
    part = (layer, kv_score, state, cache)
    if isinstance(plan, DecodePlan):
        compressor.warm_up_decode(part, plan, target)
    else:
        compressor.warm_up_prefill(part, plan, target)


def warm_up_pair(
    main: tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor],
    indexer: tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor],
    main_plan: DecodePlan,
    indexer_plan: DecodePlan,
    *,
    target: Target | None = None,
) -> None:
    """``warm_up`` for ``compress_decode_pair_``, whose arguments it takes."""
    compressor.warm_up_decode_pair((main, indexer), (main_plan, indexer_plan), target)
