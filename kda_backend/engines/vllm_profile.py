"""The profile run of vLLM at model load, on one KDA layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from backend_core.engines.vllm_flag import say
from kda_backend.engines.vllm_run import Runtime, decode, prefill, verify, window_of
from kda_backend.engines.vllm_step import Draft, Segment
from kda_backend.layer import LayerWeights, Pools, Tokens
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.selection import KdaSelection, warm_up
from kda_backend.step_plan import build_step_plan

_warm: dict[Runtime, int] = {}  # tokens of its largest profile run


def profile(
    runtime: Runtime,
    weights: LayerWeights,
    module: Any,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The profile run at model load, which has no cache yet: compile and load every kernel that the
    selection can choose, and take the memory of the largest step, so that the engine counts it."""
    out.zero_()
    if _warm.get(runtime, -1) >= qkv.shape[0]:
        return
    # an engine that the same process makes after another may have longer steps, and shares what
    # was chosen for the first one
    _warm[runtime] = qkv.shape[0]
    pools = _scratch_pools(module, qkv.device)
    window = Pools(window_of(pools.conv), pools.state)
    tables = runtime.selection.target.vendor != "cpu"

    def tokens(begin: int, end: int) -> Tokens:
        rows = slice(begin, end)
        return Tokens(qkv[rows], g[rows], beta[rows], gate[rows], torch.empty_like(out[rows]))

    def segment(lengths: list[int], *, known: bool = False) -> Segment:
        """``known``: the host knows the lengths, as in steps without drafts."""
        host = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu")
        bounds = host.cumsum(0, dtype=torch.int32)
        cu_seqlens = bounds.to(qkv.device)
        total = sum(lengths)
        n = len(lengths)
        return Segment(
            0,
            total,
            torch.full((n,), -1, dtype=torch.int32, device=qkv.device),
            torch.zeros(n, dtype=torch.bool, device=qkv.device),
            build_step_plan(
                cu_seqlens,
                total,
                cu_seqlens_cpu=bounds if known else None,
                chunk_table=tables,
            ),
        )

    def with_checkpoints(step: Segment) -> Segment:
        none = torch.full_like(step.state_indices, NULL_BLOCK_ID)
        return replace(step, checkpoints=Checkpoints.of(none, none, NULL_BLOCK_ID))

    def drafts(rows: torch.Tensor | None) -> Draft:
        size = min(qkv.shape[0] if rows is None else len(rows), 16, runtime.max_draft)
        slots = torch.full((1, runtime.max_draft), -1, dtype=torch.int32, device=qkv.device)
        bounds = torch.tensor([0, size], dtype=torch.int32, device=qkv.device)
        return Draft(rows, rows, slots, torch.ones_like(bounds)[:1], bounds)

    def run(runtime: Runtime) -> None:
        # rows of odd widths are aligned at some tokens only, and a count of 1 or of a multiple of
        # 16 is compiled apart
        for begin in range(min(2, qkv.shape[0])):
            for count in (1, 2, 16):
                if begin + count > qkv.shape[0]:
                    continue
                step = segment([1] * count)
                known = segment([1] * count, known=True)
                args = (runtime, weights, tokens(begin, begin + count), window)
                decode(*args, step)
                decode(*args, replace(step, has_initial_state=None, step_plan=None))
                prefill(*args, step)
                prefill(*args, known)
                if runtime.checkpoints:
                    prefill(*args, with_checkpoints(step))
                    prefill(*args, with_checkpoints(known))
        if runtime.max_draft:
            rows = torch.arange(qkv.shape[0], device=qkv.device)[:16]
            args = (runtime, weights, tokens(0, len(rows)), pools)
            verify(*args, drafts(None), None, None)
            # gathered from a step with prefills
            beside = segment([len(rows)])
            verify(*args, drafts(rows), beside, None)
            if runtime.checkpoints:
                verify(*args, drafts(rows), with_checkpoints(beside), None)
            for count in sorted(
                {1, min(2, len(rows)), len(rows)}
            ):  # Kimi-K3's decodes lie beside drafts
                decodes = replace(segment([1] * count), has_initial_state=None, step_plan=None)
                verify(*args, drafts(rows[:count]), None, decodes)

    def each(selection: KdaSelection) -> None:
        run(replace(runtime, selection=selection))

    warm_up(runtime.selection, each, lambda selection: None)
    total = qkv.shape[0]
    rows = max(1, min(runtime.max_sequences, total))
    largest = segment([total - rows + 1] + [1] * (rows - 1), known=True)
    for step in (largest, with_checkpoints(largest)) if runtime.checkpoints else (largest,):
        prefill(runtime, weights, tokens(0, total), window, step)
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
    return Pools(conv_pool, state_pool)
