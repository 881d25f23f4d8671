"""The public operators of softmax attention: plan once per step, run in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from backend_core.contracts import expect_kernel_device
from backend_core.launch.streams import is_elsewhere, run_there
from softmax_backend import selection as selections
from softmax_backend.contract.mla_decode import MlaInputs, check_mla_decode, split_cache
from softmax_backend.run import mla_sm90, mla_torch, mla_triton
from softmax_backend.scratch import Scratch, scratch_of_call
from softmax_backend.selection import MlaSelection
from softmax_backend.spec import MlaSpec
from softmax_backend.step_plan import StepPlan

if TYPE_CHECKING:
    from backend_core.tables.schema import KernelPath

Run = Callable[["KernelPath", MlaInputs, Scratch, bool], None]
RUNS: dict[str, Run] = {
    "torch": mla_torch.decode,
    "triton": mla_triton.decode,
    "sm90": mla_sm90.decode,
}


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_latent: torch.Tensor,
    kv_rope: torch.Tensor,
    block_table: torch.Tensor,
    plan: StepPlan,
    selection: MlaSelection,
    *,
    scale: float,
    causal: bool = True,
    kv_scale: float = 1.0,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scratch: Scratch | None = None,
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
        selection: the layer's paths (``selection.select``).
        scale: the factor of the logits.
        causal: a query token attends to the keys up to its own; the last query token is the last
            key.
        kv_scale: the factor by which the values of an fp8 cache are multiplied.
        kv_scales: ``[pages, page size, 4]`` float32 of an fp8_ds_mla cache.
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
    if is_elsewhere(plan.lengths):
        return run_there(plan.lengths, mla_decode, locals())
    x = check_mla_decode(
        selection.spec,
        plan,
        q_latent,
        q_rope,
        kv_latent,
        kv_rope,
        block_table,
        scale=scale,
        causal=causal,
        kv_scale=kv_scale,
        kv_scales=kv_scales,
        sinks=sinks,
        out=out,
        lse=lse,
    )
    path = selection.path(plan.requests)
    if path.name != "torch":
        expect_kernel_device("q_latent", q_latent)
    scratch = scratch_of_call(scratch, plan.device)
    RUNS[path.name](path, x, scratch, pdl_prefetch_safe)
    return x.out, x.lse


__all__ = ["MlaSpec", "mla_decode", "selections", "split_cache"]
