"""The public operators: check the contract, find the pipeline, run it.

Nothing here reads a device value on the host, so every operator can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.tables.select import PathSelection
from backend_core.target import Target, detect_target
from dsv4_backend.compressor import decode, in_place, prefill, queries
from dsv4_backend.compressor.bound import Bind, ByGrid, CompressorCall, LaunchCache, Pipeline
from dsv4_backend.compressor.queries import Queries
from dsv4_backend.contract import calls as contract
from dsv4_backend.spec import CompressorLayer, CompressorSpec, real_rope_table
from dsv4_backend.step_plan import (
    CompressorStepPlan,
    DecodeStepPlan,
    PrefillStepPlan,
    SeqLens,
)


def compress_norm_rope_hadamard_(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    freqs_cis: torch.Tensor,
    step_plan: SeqLens,
    *,
    head_dim: int,
    compress_ratio: int,
    rotate: bool,
    target: Target | None = None,
    selection: PathSelection | None = None,
) -> None:
    """RMSNorm, RoPE and Walsh-Hadamard rotation of pooled rows, in place, in one launch.

    Rows are computed in fp32 and rounded once, to the dtype of ``kv``. The operator is for
    compressors that pool by themselves, as transformers' do. Its contract is that of the decode
    form of sglang's ``hip_compress_fused_norm_rope_hadamard_inplace``, which no supported release
    calls any more.

    Args:
        kv: [rows, head_dim] fp32 or bf16, last dimension contiguous, any row stride; rewritten.
        weight: [head_dim] fp32 or bf16, of the RMSNorm.
        eps: added to the mean square.
        freqs_cis: complex64 [positions, 32], or real [positions, 64] interleaved (cos, sin).
        step_plan: the lengths of the rows' sequences. Only rows that end a window are changed;
            their position is that of the window's first new token.
        head_dim: 128 or 512.
        compress_ratio: 4 or 128.
        rotate: multiply by H / sqrt(head_dim) at the end.
        target: the processor to choose kernels for, by default that of ``kv``.
        selection: the kernel paths to use, by default those of the target's table.

    Raises:
        ValueError: an argument breaks this contract; nothing was written.
        LookupError: there are no kernel paths for the target.
    """
    if is_elsewhere(kv):
        return run_there(kv, compress_norm_rope_hadamard_, locals())
    table = real_rope_table(freqs_cis)
    contract.check_in_place(kv, weight, eps, table, step_plan, head_dim, compress_ratio, rotate)
    if selection is None:
        target = target or detect_target(kv.device)
        paths = in_place.pipelines(target, head_dim, compress_ratio, rotate)
    else:
        paths = in_place.pipelines_of(selection, head_dim, compress_ratio, rotate)
    paths.at(step_plan.num_tokens)(kv, weight, eps, table, step_plan.seq_lens)


def compress_decode_(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    step_plan: DecodeStepPlan,
    *,
    second_cache: torch.Tensor | None = None,
    target: Target | None = None,
    selection: PathSelection | None = None,
    launches: LaunchCache | None = None,
) -> None:
    """Store the state row of one new token per request, and the cached row of windows that end.

    Args:
        layer: the compressor.
        kv_score: [N, 2·C·d] fp32 or bf16, rows [kv | score] without APE, with any row stride. Rows
            beyond those of the step plan are ignored.
        state: [pages, rows, 2·C·d] fp32 or bf16; the step plan's class says how many rows a page
            has. The rows that the step plan names are written.
        cache: [pages, page bytes] uint8; the distance of pages is a multiple of 4 bytes. The slots
            that the step plan names are written in ``layer.spec.cache_format``.
        step_plan: ``RingDecode`` or ``PagedDecode``.
        second_cache: [pages, second page bytes] uint8, pages a multiple of 4 bytes apart, for
            formats that keep a part of each record in a second tensor; ``None`` for all others.
        target: the processor to choose kernels for, by default that of ``kv_score``.
        selection: the kernel paths to use, by default those of the target's table.
        launches: keeps the checks and packed arguments of this call for later calls that agree with
            it, which then take a third of the host time. Without it every call checks and packs.

    Raises:
        ValueError: an argument breaks this contract; nothing was written.
        LookupError: there are no kernel paths for the target.
    """
    if is_elsewhere(kv_score):
        return run_there(kv_score, compress_decode_, locals())
    contract.check_step_plan(step_plan, DecodeStepPlan)
    call = CompressorCall(layer, kv_score, state, cache, second_cache)
    paths = _pipelines(decode.bind, call, step_plan, target, selection, launches)
    paths.at(step_plan.num_tokens)(call, step_plan)


def compress_prefill_(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    step_plan: PrefillStepPlan,
    *,
    second_cache: torch.Tensor | None = None,
    target: Target | None = None,
    selection: PathSelection | None = None,
    launches: LaunchCache | None = None,
) -> None:
    """Store the cached row of every window that ends in chunks of requests, and the state rows.

    The rows of a window come from ``kv_score`` if they are in the chunk, and from ``state`` if they
    are before it, so a prompt may be cut into chunks anywhere.

    Args:
        layer, state, cache, second_cache, target, selection, launches: as in
            ``compress_decode_``.
        kv_score: [T, 2·C·d] fp32 or bf16, requests one after another.
        step_plan: ``RingPrefill`` or ``PagedPrefill``.

    Raises:
        ValueError: an argument breaks this contract; nothing was written.
        LookupError: there are no kernel paths for the target.
    """
    if is_elsewhere(kv_score):
        return run_there(kv_score, compress_prefill_, locals())
    contract.check_step_plan(step_plan, PrefillStepPlan)
    call = CompressorCall(layer, kv_score, state, cache, second_cache)
    paths = _pipelines(prefill.bind, call, step_plan, target, selection, launches)
    paths.at(step_plan.num_windows)(call, step_plan)


def warm_up(
    layer: CompressorLayer,
    kv_score: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    step_plan: DecodeStepPlan | PrefillStepPlan,
    *,
    second_cache: torch.Tensor | None = None,
    target: Target | None = None,
    selection: PathSelection | None = None,
    launches: LaunchCache | None = None,
) -> None:
    """Compile at model load the kernels that ``compress_decode_`` or ``compress_prefill_`` may use.

    Nothing is launched. Later calls find their kernels if their tensors have the same dtypes,
    strides and 16-byte alignment as these; the number of tokens does not matter.

    Args:
        layer, kv_score, state, cache, step_plan, second_cache, target, selection, launches: as in
            the operator; the step plan's class chooses it.

    Raises:
        ValueError: an argument breaks the operator's contract.
        LookupError: there are no kernel paths for the target.
    """
    if is_elsewhere(kv_score):
        return run_there(kv_score, warm_up, locals())
    contract.check_step_plan(step_plan, CompressorStepPlan)
    bind: Bind = decode.bind if isinstance(step_plan, DecodeStepPlan) else prefill.bind
    call = CompressorCall(layer, kv_score, state, cache, second_cache)
    for path in _pipelines(bind, call, step_plan, target, selection, launches).values:
        path.warm_up(call, step_plan)


def quantise_indexer_queries(
    spec: CompressorSpec,
    q: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    *,
    target: Target | None = None,
    selection: PathSelection | None = None,
) -> Queries:
    """Apply RoPE and the spec's rotation to an indexer's queries and quantise them.

    Keys and queries are multiplied with each other, so both must be rotated and quantised in the
    same way: both take rotation, format and rounding from one ``CompressorSpec``. A token's score
    of a key is sum_h weight_h · relu(q_h · k). The two scales, and for fp8 also the scale of the
    head's row, are multiplied into weight_h, as vLLM's logits kernels expect.

    Args:
        spec: of the indexer's keys.
        q: [T, H, 128] fp32 or bf16, last dimension contiguous.
        positions: [T] int32 or int64.
        rope_table: [positions, 64] in ``spec.rope_layout``.
        weights: [T, H] fp32 or bf16, last dimension contiguous.
        softmax_scale, head_scale: 128^-0.5 and H^-0.5 in the model.
        target: the processor to choose kernels for, by default that of ``q``.
        selection: the kernel paths to use, by default those of the target's table.

    Returns:
        Codes uint8 [T, H, 128] of e4m3, or [T, H, 64] of e2m1 pairs; scales uint8 [T, H, 4] (UE8M0)
        of the latter, otherwise ``None``; weights fp32 [T, H].

    Raises:
        ValueError: an argument breaks this contract.
        LookupError: there are no kernel paths for the target.
    """
    if is_elsewhere(q):
        return run_there(q, quantise_indexer_queries, locals())
    contract.check_queries(spec, q, positions, rope_table, weights)
    if selection is None:
        paths = queries.pipelines(target or detect_target(q.device), spec)
    else:
        paths = queries.pipelines_of(selection, spec)
    run = paths.at(q.shape[0] * q.shape[1])
    return run(q, positions, rope_table, weights, softmax_scale, head_scale)


def _pipelines(
    bind: Bind,
    call: CompressorCall,
    step_plan: CompressorStepPlan,
    target: Target | None,
    selection: PathSelection | None,
    launches: LaunchCache | None,
) -> ByGrid[Pipeline[Any]]:
    if launches is None:
        return bind(call, step_plan, target, selection)
    return launches.find(bind, call, step_plan, target, selection)
