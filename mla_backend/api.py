"""The public operators of MLA: plan once per step, run in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend_core.contracts import number, once
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.operator import Selection, select
from backend_core.target import Target, detect_target
from mla_backend.contract import token_stride
from mla_backend.contract.mla_decode import MlaInputs, check_mla_decode, split_cache
from mla_backend.decode import MlaPath
from mla_backend.launch_params import TABLES
from mla_backend.scratch import SplitScratch, scratch_of_call
from mla_backend.spec import MlaSpec
from mla_backend.step_plan import MlaPlan


def select_mla_decode(target: Target, spec: MlaSpec) -> Selection[MlaSpec, MlaPath]:
    """Choose the paths of a layer; call it at model load (`backend_core.operator.select`)."""
    return select(TABLES, "mla_decode", target, spec)


def selection_for(device: torch.device, spec: MlaSpec) -> Selection[MlaSpec, MlaPath]:
    """The selection for the processor that a device is."""
    return select_mla_decode(detect_target(device), spec)


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_latent: torch.Tensor,
    kv_rope: torch.Tensor,
    block_table: torch.Tensor,
    plan: MlaPlan,
    selection: Selection[MlaSpec, MlaPath],
    *,
    scale: float,
    causal: bool = True,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scratch: SplitScratch | None = None,
    pdl_prefetch_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one step's queries to a paged latent cache (MLA in its absorbed form).

    For each request and query row, over the keys k that the row sees, v being k's latent part::

        s = scale (q_latent . k_latent + q_rope . k_rope);  out = sum_k softmax(s)_k v_k

    The host never waits for the GPU. A call can be captured in a CUDA graph if the graph has a plan
    of its own.

    Args:
        q_latent: ``[requests, query tokens, heads, 512]`` in the spec's dtype, any stride between
            heads and between tokens; q_rope: the same with 64.
        kv_latent: ``[pages, page size, 512]``; kv_rope: ``[pages, page size, 64]``. Two tensors or
            two views of one (``split_cache``). Rows that no request owns may hold anything.
        block_table: ``[requests, pages]`` int32; entries beyond a request's pages are not read.
        plan: the plan of this step (``MlaPlanner.plan``), which holds the lengths.
        selection: the layer's paths (``select_mla_decode``).
        scale: the factor of the logits.
        causal: a query token attends to the keys up to its own; the last query token is the last
            key.
        sinks: ``[heads]`` float32 natural logits that take a share of the weights and no part in
            the LSE.
        out: ``[requests, query tokens, heads, 512]``; lse: ``[requests, query tokens, heads]``
            float32; where to write the results, contiguous.
        scratch: the memory for splits; by default the device's own.
        pdl_prefetch_safe: a promise that no kernel which may still run writes the plan, its lengths
            or the block table. On Hopper they are then read before the previous kernel has ended.
            The promise holds in every layer except the first after planning.

    Returns:
        (out, lse); lse is the natural log-sum-exp of the logits. A row that sees no key has output
        0 and lse +inf.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
    """
    if not isinstance(plan, MlaPlan):
        raise ValueError(f"plan must be a plan of MlaPlanner, got {type(plan).__name__}")
    if is_elsewhere(plan.lengths):
        return run_there(plan.lengths, mla_decode, locals())
    spec, prefix, scale = selection.spec, plan.prefix, number("scale", scale)
    q, kv = (q_latent, q_rope), (kv_latent, kv_rope)
    heads = None if prefix is None else prefix.num_heads
    step = (plan.lengths, plan.query_tokens, heads)
    layout = _layout(selection, *step, q, kv, block_table, scale, sinks, out, lse)
    if out is None:
        out = torch.empty(q_latent.shape, dtype=spec.dtype, device=plan.device)
    if lse is None:
        lse = torch.empty(q_latent.shape[:3], dtype=torch.float32, device=plan.device)
    results = (sinks, out, lse, pdl_prefetch_safe, layout.strides_q_t)
    x = MlaInputs(spec, plan, q, kv, block_table, scale, causal, *results)
    key = layout, causal, pdl_prefetch_safe
    prepared = plan.prepared.get(key)
    if prepared is None:
        prepared = plan.prepared.keep(key, layout.path.prepare(x))
    prepared(x, scratch_of_call(scratch, plan.device))
    return out, lse


@dataclass(frozen=True, eq=False)
class _Layout:
    """The path and strides of checked calls that agree; compared by identity."""

    path: MlaPath
    strides_q_t: tuple[int, int]


@once
def _layout(
    selection: Selection[MlaSpec, MlaPath],
    lengths: torch.Tensor,
    query_tokens: int,
    prefix_heads: int | None,
    q: tuple[torch.Tensor, torch.Tensor],
    kv: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> _Layout:
    spec, step = selection.spec, (lengths, query_tokens, prefix_heads)
    check_mla_decode(spec, *step, q, kv, block_table, scale, sinks, out, lse)
    requests = lengths.shape[0]
    selection.expect_device("q_latent", q[0])
    return _Layout(selection.run(requests), (token_stride(q[0]), token_stride(q[1])))


__all__ = ["MlaSpec", "mla_decode", "select_mla_decode", "selection_for", "split_cache"]
