"""The profile run of vLLM at model load, on one KDA layer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from backend_core.engines.vllm_flag import say
from kda_backend.engines.prefill_calls import PARTIAL_CHUNKS
from kda_backend.engines.vllm_run import Pools, Runtime, records_of, run_part, verify
from kda_backend.engines.vllm_step import Draft, StepPart
from kda_backend.layer import LayerWeights, Projections
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.selection import KdaSelection, warm_up
from kda_backend.step_plan import build_step_plan

_warm: dict[tuple[Runtime, bool], int] = {}
"""Tokens of the largest profile run of a runtime, of layers with records of drafts and without."""


def profile(module: Any, weights: LayerWeights, x: Projections) -> None:
    """The profile run at model load, which has no cache yet: compile and load every kernel that the
    selection can choose, and take the memory of the largest step, so that the engine counts it."""
    runtime: Runtime = module.kda_runtime
    x.out.zero_()
    total, device = x.out.shape[0], x.out.device
    records = records_of(module)
    engine = (runtime, records is not None)
    if _warm.get(engine, -1) >= total:
        return
    # an engine that the same process makes after another may have longer steps, or records of
    # drafts, and shares what was chosen for the first one
    _warm[engine] = total
    pools = _scratch_pools(module, device)
    tables = runtime.selection.target.vendor != "cpu"

    def tokens(begin: int, end: int) -> Projections:
        qkv, g, beta, gate, out = (tensor[begin:end] for tensor in x)
        return Projections(qkv, g, beta, gate, torch.empty_like(out))

    def prefills(lengths: list[int], *, known: bool = False) -> StepPart:
        """``known``: the host knows the lengths, as everywhere but in a capture."""
        host = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu")
        bounds, n = host.cumsum(0, dtype=torch.int32), len(lengths)
        return StepPart(
            0,
            sum(lengths),
            torch.full((n,), -1, dtype=torch.int32, device=device),
            torch.zeros(n, dtype=torch.bool, device=device),
            build_step_plan(
                bounds.to(device),
                sum(lengths),
                cu_seqlens_cpu=bounds if known else None,
                chunk_table=tables,
            ),
        )

    def with_and_without_checkpoints(step: StepPart) -> list[StepPart]:
        if not runtime.checkpoints:
            return [step]
        none = torch.full_like(step.state_indices, NULL_BLOCK_ID)
        return [step, replace(step, checkpoints=Checkpoints.of(none, none, NULL_BLOCK_ID))]

    def decodes(count: int) -> StepPart:
        return replace(prefills([1] * count), has_initial_state=None, step_plan=None)

    def drafts(rows: torch.Tensor | None) -> Draft:
        size = min(total if rows is None else len(rows), 16, runtime.max_draft)
        width = runtime.max_draft if records is None else 1
        slots = torch.full((1, width), -1, dtype=torch.int32, device=device)
        bounds = torch.tensor([0, size], dtype=torch.int32, device=device)
        one, first = torch.ones_like(bounds)[:1], torch.zeros_like(bounds)[:1]
        return Draft(rows, rows, slots, one, bounds, first)

    def run(selection: KdaSelection) -> None:
        forced = replace(runtime, selection=selection)
        # rows of odd widths are aligned at some tokens only, and a count of 1 or of a multiple of
        # 16 is compiled apart
        for begin, count in itertools.product(range(min(2, total)), (1, 2, 16)):
            if begin + count > total:
                continue
            step, known = prefills([1] * count), prefills([1] * count, known=True)
            for part in (
                decodes(count),
                *with_and_without_checkpoints(step),
                *with_and_without_checkpoints(known),
            ):
                run_part(forced, weights, tokens(begin, begin + count), pools, part)
        if runtime.max_draft:
            rows = torch.arange(total, device=device)[:16]
            n = len(rows)
            args = (forced, weights, tokens(0, n), pools)
            verify(*args, drafts(None), [], records)
            # gathered from a step with prefills
            for beside in with_and_without_checkpoints(prefills([n], known=True)):
                verify(*args, drafts(rows), [beside], records)
            for count in sorted({1, min(2, n), n}):  # Kimi-K3's decodes lie beside drafts
                verify(*args, drafts(rows[:count]), [decodes(count)], records)
            if records is not None and records.by_norm:
                from kda_backend.engines.vllm_fold import compile_fold

                compile_fold(module, selection, pools)

    warm_up(runtime.selection, run, lambda selection: None)
    requests = max(1, min(runtime.max_sequences, 1 + PARTIAL_CHUNKS, total))
    largest = prefills([total - requests + 1] + [1] * (requests - 1), known=True)
    run_part(runtime, weights, tokens(0, total), pools, largest)
    taken = 0 if runtime.scratch is None else runtime.scratch.nbytes / 2**20
    say(f"kernels are loaded; scratch memory of {total} tokens is {taken:.0f} MiB")


def _page_layout(module: Any) -> tuple[list[int], int]:
    """Bytes of the convolution's and of the recurrent state, and of the page that holds both."""
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(module.get_state_shape(), module.get_state_dtype(), strict=True)
    ]
    return sizes, max(sum(sizes), module.cache_config.mamba_page_size_padded or 0)


def has_aligned_states(module: Any) -> bool:
    """Whether the recurrent state of every page starts at a multiple of 16 bytes."""
    (conv_bytes, _), page = _page_layout(module)
    return conv_bytes % 16 == 0 and page % 16 == 0


def _scratch_pools(module: Any, device: torch.device) -> Pools:
    """Pools of one slot, laid out in pages as the engine lays out its own."""
    shapes, dtypes = module.get_state_shape(), module.get_state_dtype()
    sizes, page = _page_layout(module)
    memory = torch.zeros(2 * page, dtype=torch.uint8, device=device)
    pools, offset = [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        strides = torch.empty(shape, device="meta").stride()
        item = dtype.itemsize
        pools.append(
            memory.view(dtype).as_strided((2, *shape), (page // item, *strides), offset // item)
        )
        offset += size
    conv_pool, state_pool = pools
    if not is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(-1, -2)
    return conv_pool, state_pool
