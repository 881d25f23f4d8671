"""What vLLM's KDA layers have in common on this backend, whatever the release.

A layer's tokens come decodes first. Decodes go through the decode kernel, also beside prefills,
and prefills through the chunked one; both read and write the engine's pools in place. Slot 0 is
vLLM's null block: padded rows name it, and have no tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from backend_core.strict import fallback
from backend_core.target import detect_target
from kda_backend import layer
from kda_backend.engines.vllm import flag_name, is_requested
from kda_backend.engines.vllm_step import Draft, Part, build_step
from kda_backend.layer import LayerWeights, Pools, Tokens
from kda_backend.scratch import Workspace
from kda_backend.selection import KdaPlan, KdaShape, select, warm_up
from kda_backend.step_plan import build_metadata

logger = init_logger("vllm.kda_dsv4")

_STEP = "_kda_dsv4_step"


@dataclass(frozen=True)
class Runtime:
    """What the layers of one model share: its plan, and scratch memory where it may be shared."""

    plan: KdaPlan
    workspace: Workspace | None
    max_sequences: int
    max_draft: int  # tokens of a draft; 0 without speculative decoding


def runtime_of(
    vllm_config: VllmConfig,
    shape: KdaShape,
    state_dtype: torch.dtype,
    conv_size: int,
    *,
    verifies_drafts: bool,
) -> Runtime | None:
    """The runtime of a model's layers where the flag asks for it and a path serves them.

    ``verifies_drafts``: whether this release's metadata has what speculative decoding needs. Says
    once what was chosen; what is refused goes to stock code and is said once, or raises in
    strict mode.
    """
    if not is_requested(vllm_config):
        return None
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else 1 + speculative.num_speculative_tokens
    refusal = _refusal(shape, state_dtype, conv_size, bool(drafts) and not verifies_drafts)
    if refusal is None:
        try:
            return _runtime(
                torch.device(vllm_config.device_config.device_type),
                shape,
                vllm_config.scheduler_config.max_num_seqs,
                drafts,
                vllm_config.parallel_config.use_ubatching,
            )
        except (LookupError, ValueError) as error:
            refusal = str(error)
    fallback(f"--attention-backend {flag_name()}: {refusal}")
    return None


def _refusal(
    shape: KdaShape, state_dtype: torch.dtype, conv_size: int, unknown_drafts: bool
) -> str | None:
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
    plan = select(detect_target(device), shape)
    logger.info(
        "kda-dsv4-backend serves the KDA layers on %s (%s): %d heads of %d a rank, %s gate",
        plan.target.name,
        plan.target.arch,
        shape.num_value_heads,
        shape.value_dim,
        "bounded" if shape.bounded_gate else "unbounded",
    )
    for line in plan.explain():
        logger.info("kda-dsv4-backend: %s", line)
    # Two micro-batches run layers at the same time: each call then has memory of its own.
    workspace = None if concurrent else Workspace(device)
    return Runtime(plan, workspace, max_sequences, max_draft)


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
    """A layer between its projections.

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
    step = getattr(metadata, _STEP, None)
    # the layers that share metadata have caches and projections of one shape
    checked = step is not None
    if step is None:
        step = build_step(metadata, runtime.plan)
        setattr(metadata, _STEP, step)
    conv_pool, state_pool = module.kv_cache
    if not is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(-1, -2)
    whole, pools = Tokens(qkv, g, beta, gate, out), Pools(conv_pool, state_pool)
    if step.draft is not None:
        _verify(runtime, weights, whole, pools, step.draft, step.prefill)
        return
    window = Pools(_window(conv_pool), state_pool)
    if step.decode is not None:
        _decode(runtime, weights, _rows(whole, step.decode), window, step.decode)
    if step.prefill is not None:
        tokens = _rows(whole, step.prefill)
        _prefill(runtime, weights, tokens, window, step.prefill, checked=checked)
    if step.num_tokens < out.shape[0]:
        out[step.num_tokens :].zero_()


def _rows(tokens: Tokens, part: Part) -> Tokens:
    if part.end - part.begin == tokens.out.shape[0]:
        return tokens
    rows = slice(part.begin, part.end)
    return Tokens(*(x[rows] for x in tokens))


def _prefill(
    runtime: Runtime,
    weights: LayerWeights,
    tokens: Tokens,
    pools: Pools,
    part: Part,
    *,
    checked: bool = False,
) -> None:
    assert part.metadata is not None
    workspace = runtime.workspace
    layer.prefill(
        weights,
        runtime.plan,
        tokens,
        pools,
        part.state_indices,
        part.has_initial_state,
        part.metadata,
        Workspace(tokens.out.device) if workspace is None else workspace,
        checked=checked,
    )


def _decode(
    runtime: Runtime, weights: LayerWeights, tokens: Tokens, pools: Pools, part: Part
) -> None:
    args = (weights, runtime.plan, tokens, pools, part.state_indices)
    if part.metadata is None:
        layer.decode(*args, null_slot=NULL_BLOCK_ID)
    else:
        layer.decode_or_start(*args, part.has_initial_state, part.metadata)


def _verify(
    runtime: Runtime,
    weights: LayerWeights,
    whole: Tokens,
    pools: Pools,
    draft: Draft,
    prefill: Part | None,
) -> None:
    """Drafts, and the prefills beside them, whose tokens may lie between those of drafts."""
    whole.out.zero_()  # padded tokens belong to no sequence

    def gathered(rows: torch.Tensor) -> Tokens:
        qkv, g, beta, gate, _ = (x.index_select(0, rows) for x in whole)
        return Tokens(qkv, g, beta, gate, torch.zeros_like(gate))

    tokens = whole if draft.rows is None else gathered(draft.rows)
    layer.verify(
        weights,
        runtime.plan,
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
    """The columns that all but a verification use; drafts roll on through those behind."""
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
    plan can choose, and take the memory of the largest step, so that the engine counts it."""
    out.zero_()
    if runtime in _warm:
        return
    _warm.add(runtime)
    pools = _scratch_pools(module, qkv.device)
    window = Pools(_window(pools.conv), pools.state)
    tables = runtime.plan.target.vendor != "cpu"

    def tokens(begin: int, end: int) -> Tokens:
        part = slice(begin, end)
        return Tokens(qkv[part], g[part], beta[part], gate[part], torch.empty_like(out[part]))

    def part(lengths: list[int]) -> Part:
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cu_seqlens = bounds.to(qkv.device)
        total = sum(lengths)
        n = len(lengths)
        return Part(
            0,
            total,
            torch.full((n,), -1, dtype=torch.int32, device=qkv.device),
            torch.zeros(n, dtype=torch.bool, device=qkv.device),
            build_metadata(cu_seqlens, total, chunk_table=tables),
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
                step = part([1] * count)
                args = (runtime, weights, tokens(begin, begin + count), window)
                _decode(*args, step)
                _decode(*args, replace(step, has_initial_state=None, metadata=None))
                _prefill(*args, step)
        if runtime.max_draft:
            # alone, then gathered from a step with prefills
            for rows in (None, torch.arange(qkv.shape[0], device=qkv.device)[:16]):
                args = (runtime, weights, tokens(0, min(16, qkv.shape[0])), pools)
                _verify(*args, drafts(rows), None if rows is None else part([len(rows)]))

    def each(plan: KdaPlan) -> None:
        run(replace(runtime, plan=plan))

    warm_up(runtime.plan, each, lambda plan: None)
    total = qkv.shape[0]
    rows = max(1, min(runtime.max_sequences, total))
    largest = part([total - rows + 1] + [1] * (rows - 1))
    _prefill(runtime, weights, tokens(0, total), window, largest)
    logger.info(
        "kda-dsv4-backend: kernels are loaded; scratch memory of %d tokens is %.0f MiB",
        total,
        0 if runtime.workspace is None else runtime.workspace.nbytes / 2**20,
    )


def _scratch_pools(module: Any, device: torch.device) -> Pools:
    """Pools of one slot, laid out in pages as the engine lays out its own."""
    shapes, dtypes = module.get_state_shape(), module.get_state_dtype()
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    page = max(sum(sizes), module.cache_config.mamba_page_size_padded or 0)
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
