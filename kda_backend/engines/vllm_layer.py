"""What vLLM's KDA layers have in common on this backend, whatever the release.

The tokens of decodes come before those of prefills. Decodes run on the decode kernel, also in a
step with prefills, and prefills on the chunked one; both read and write the engine's pools in
place. Slot 0 is vLLM's null block: padded rows name it, and have no tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from backend_core.engines.vllm_flag import batch_invariant, log_failed_step, logger, requested
from backend_core.strict import fallback
from backend_core.target import detect_target
from kda_backend import layer
from kda_backend.engines.vllm_step import Draft, Segment, build_step
from kda_backend.layer import LayerWeights, Pools, Tokens
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection, KdaShape, select, warm_up
from kda_backend.step_plan import build_step_plan

_STEP = "_kda_dsv4_step"


@dataclass(frozen=True)
class Runtime:
    """What the layers of one model share.

    Attributes:
        scratch: ``None`` where layers run at the same time, so that each call has its own.
        max_draft: tokens of a draft; 0 without speculative decoding.
    """

    selection: KdaSelection
    scratch: Scratch | None
    max_sequences: int
    max_draft: int


def runtime_of(
    vllm_config: VllmConfig,
    module: Any,
    shape: KdaShape,
    *,
    verifies_drafts: bool,
    full_rank_gate: bool = False,
) -> Runtime | None:
    """The runtime of a model's layers where the flag asks for it and a path serves them.

    What was chosen is logged once. What is refused runs on upstream code and is logged once, or
    raises in strict mode.

    Args:
        module: the engine's layer.
        shape: of the layer, whatever the alignment of its states.
        verifies_drafts: whether this release's metadata has what speculative decoding needs.
    """
    name = requested(vllm_config)
    if name is None:
        return None
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else 1 + speculative.num_speculative_tokens
    unknown_drafts = bool(drafts) and not verifies_drafts
    refusal = _refusal(shape, module.get_state_dtype()[1], module.conv_size, unknown_drafts)
    if full_rank_gate:  # its forward also exports prefill checkpoints
        refusal = "KDA layers with a full-rank gate are not replaced"
    if refusal is None:
        try:
            return _runtime(
                torch.device(vllm_config.device_config.device_type),
                replace(shape, aligned_state=_has_aligned_states(module)),
                vllm_config.scheduler_config.max_num_seqs,
                drafts,
                vllm_config.parallel_config.use_ubatching,
            )
        except (LookupError, ValueError) as error:
            refusal = str(error)
    fallback(f"--attention-backend {name}: {refusal}")
    return None


def _refusal(
    shape: KdaShape, state_dtype: torch.dtype, conv_size: int, unknown_drafts: bool
) -> str | None:
    if batch_invariant():
        return "VLLM_BATCH_INVARIANT is set, and the paths of this backend change with the batch"
    if unknown_drafts:
        return "speculative decoding is on, which the KDA layers of this backend do not serve"
    if state_dtype not in (torch.float32, torch.bfloat16):
        return f"the KDA state must be float32 or bfloat16, got {state_dtype}"
    if conv_size != 4:
        return f"the short convolution must have 4 taps, got {conv_size}"
    if shape.value_dim > 128:
        return f"KDA heads must have at most 128 channels, got {shape.value_dim}"
    return None


@functools.cache
def _runtime(
    device: torch.device, shape: KdaShape, max_sequences: int, max_draft: int, concurrent: bool
) -> Runtime:
    selection = select(detect_target(device), shape)
    logger.info(
        "kda-dsv4-backend serves the KDA layers on %s (%s): %d heads of %d per rank, %s gate",
        selection.target.name,
        selection.target.arch,
        shape.num_value_heads,
        shape.value_dim,
        "bounded" if shape.bounded_gate else "unbounded",
    )
    for line in selection.explain():
        logger.info("kda-dsv4-backend: %s", line)
    # Two micro-batches run layers at the same time: each call then has memory of its own.
    scratch = None if concurrent else Scratch(device)
    return Runtime(selection, scratch, max_sequences, max_draft)


def attend(
    runtime: Runtime,
    weights: LayerWeights,
    module: Any,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """A layer between its projections; see `log_failed_step` for what an exception does.

    Args:
        module: the engine's layer: its prefix and its cache.
        qkv: ``[T, 3 H D]``; g, gate: ``[T, H, D]``; beta: ``[T, H]``; all before activation. T may
            be padded.
        out: ``[T, H, D]``, written; zeros where T is padding.
    """
    metadata = get_forward_context().attn_metadata
    metadata = metadata.get(module.prefix) if isinstance(metadata, dict) else None
    if metadata is None:
        _profile(runtime, weights, module, qkv, g, beta, gate, out)
        return
    whole = Tokens(qkv, g, beta, gate, out)
    try:
        _run_step(runtime, weights, module, whole, metadata)
    except Exception as error:
        log_failed_step(f"KDA layer {module.prefix}", error)
        raise


def _run_step(
    runtime: Runtime, weights: LayerWeights, module: Any, whole: Tokens, metadata: Any
) -> None:
    step = getattr(metadata, _STEP, None)
    # the layers that share metadata have caches and projections of one shape
    checked = step is not None
    if step is None:
        step = build_step(metadata, runtime.selection)
        setattr(metadata, _STEP, step)
    conv_pool, state_pool = module.kv_cache
    if not is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(-1, -2)
    pools = Pools(conv_pool, state_pool)
    if step.draft is not None:
        _verify(runtime, weights, whole, pools, step.draft, step.prefill)
        return
    window = Pools(_window(conv_pool), state_pool)
    if step.decode is not None:
        _decode(runtime, weights, _rows(whole, step.decode), window, step.decode)
    if step.prefill is not None:
        tokens = _rows(whole, step.prefill)
        _prefill(runtime, weights, tokens, window, step.prefill, checked=checked)
    if step.num_tokens < whole.out.shape[0]:
        whole.out[step.num_tokens :].zero_()


def _rows(tokens: Tokens, segment: Segment) -> Tokens:
    if segment.end - segment.begin == tokens.out.shape[0]:
        return tokens
    rows = slice(segment.begin, segment.end)
    return Tokens(*(x[rows] for x in tokens))


def _prefill(
    runtime: Runtime,
    weights: LayerWeights,
    tokens: Tokens,
    pools: Pools,
    segment: Segment,
    *,
    checked: bool = False,
) -> None:
    assert segment.step_plan is not None
    scratch = runtime.scratch
    layer.prefill(
        weights,
        runtime.selection,
        tokens,
        pools,
        segment.state_indices,
        segment.has_initial_state,
        segment.step_plan,
        Scratch(tokens.out.device) if scratch is None else scratch,
        checked=checked,
    )


def _decode(
    runtime: Runtime, weights: LayerWeights, tokens: Tokens, pools: Pools, segment: Segment
) -> None:
    args = (weights, runtime.selection, tokens, pools, segment.state_indices)
    if segment.step_plan is None:
        layer.decode(*args, null_slot=NULL_BLOCK_ID)
    else:
        layer.decode_or_start(*args, segment.has_initial_state, segment.step_plan)


def _verify(
    runtime: Runtime,
    weights: LayerWeights,
    whole: Tokens,
    pools: Pools,
    draft: Draft,
    prefill: Segment | None,
) -> None:
    """Drafts, and the prefills beside them, whose tokens may lie between those of drafts."""
    whole.out.zero_()  # padded tokens belong to no sequence

    def gathered(rows: torch.Tensor) -> Tokens:
        qkv, g, beta, gate, _ = (x.index_select(0, rows) for x in whole)
        return Tokens(qkv, g, beta, gate, torch.zeros_like(gate))

    tokens = whole if draft.rows is None else gathered(draft.rows)
    layer.verify(
        weights,
        runtime.selection,
        tokens,
        pools,
        draft.state_indices,
        draft.num_accepted,
        draft.cu_seqlens,
        NULL_BLOCK_ID,
    )
    if draft.rows is not None and draft.others is not None:
        whole.out.index_copy_(0, draft.rows, tokens.out)
        if prefill is not None:
            tokens = gathered(draft.others)
            window = Pools(_window(pools.conv), pools.state)
            _prefill(runtime, weights, tokens, window, prefill)
            whole.out.index_copy_(0, draft.others, tokens.out)


def _window(conv_pool: torch.Tensor) -> torch.Tensor:
    """The first three columns, which hold the window; drafts also use those after them."""
    return conv_pool if conv_pool.shape[2] == 3 else conv_pool[:, :, :3]


_warm: set[Runtime] = set()


def _profile(
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
    if runtime in _warm:
        return
    _warm.add(runtime)
    pools = _scratch_pools(module, qkv.device)
    window = Pools(_window(pools.conv), pools.state)
    tables = runtime.selection.target.vendor != "cpu"

    def tokens(begin: int, end: int) -> Tokens:
        rows = slice(begin, end)
        return Tokens(qkv[rows], g[rows], beta[rows], gate[rows], torch.empty_like(out[rows]))

    def segment(lengths: list[int]) -> Segment:
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cu_seqlens = bounds.to(qkv.device)
        total = sum(lengths)
        n = len(lengths)
        return Segment(
            0,
            total,
            torch.full((n,), -1, dtype=torch.int32, device=qkv.device),
            torch.zeros(n, dtype=torch.bool, device=qkv.device),
            build_step_plan(cu_seqlens, total, chunk_table=tables),
        )

    def drafts(rows: torch.Tensor | None) -> Draft:
        size = min(16, qkv.shape[0], runtime.max_draft)
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
                args = (runtime, weights, tokens(begin, begin + count), window)
                _decode(*args, step)
                _decode(*args, replace(step, has_initial_state=None, step_plan=None))
                _prefill(*args, step)
        if runtime.max_draft:
            # alone, then gathered from a step with prefills
            for rows in (None, torch.arange(qkv.shape[0], device=qkv.device)[:16]):
                args = (runtime, weights, tokens(0, min(16, qkv.shape[0])), pools)
                _verify(*args, drafts(rows), None if rows is None else segment([len(rows)]))

    def each(selection: KdaSelection) -> None:
        run(replace(runtime, selection=selection))

    warm_up(runtime.selection, each, lambda selection: None)
    total = qkv.shape[0]
    rows = max(1, min(runtime.max_sequences, total))
    largest = segment([total - rows + 1] + [1] * (rows - 1))
    _prefill(runtime, weights, tokens(0, total), window, largest)
    logger.info(
        "kda-dsv4-backend: kernels are loaded; scratch memory of %d tokens is %.0f MiB",
        total,
        0 if runtime.scratch is None else runtime.scratch.nbytes / 2**20,
    )


def _page_layout(module: Any) -> tuple[list[int], int]:
    """Bytes of the convolution's and of the recurrent state, and of the page that holds both."""
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(module.get_state_shape(), module.get_state_dtype(), strict=True)
    ]
    return sizes, max(sum(sizes), module.cache_config.mamba_page_size_padded or 0)


def _has_aligned_states(module: Any) -> bool:
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
