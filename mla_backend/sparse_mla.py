"""Sparse MLA: attention to named rows of one or two caches, as DeepSeek-V4 has it."""

from __future__ import annotations

from typing import TypeAlias

import torch

from backend_core.contracts import number, once
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.operator import Selection, select
from backend_core.target import Target, detect_target
from mla_backend.contract import token_stride
from mla_backend.contract.sparse_mla import (
    NamedRows,
    SparseMlaInputs,
    check_addresses,
    check_sparse_mla,
)
from mla_backend.launch_params import TABLES
from mla_backend.scratch import SplitScratch, scratch_of_call
from mla_backend.sparse import SparseRun
from mla_backend.spec_sparse_mla import SparseMlaSpec

SparseMlaSelection: TypeAlias = "Selection[SparseMlaSpec, SparseRun]"


def select_sparse_mla(target: Target, spec: SparseMlaSpec) -> SparseMlaSelection:
    """Choose the paths of a layer; call it at model load (`backend_core.operator.select`)."""
    return select(TABLES, "sparse_mla", target, spec)


def selection_for(device: torch.device, spec: SparseMlaSpec) -> SparseMlaSelection:
    """The selection for the processor that a device is."""
    return select_sparse_mla(detect_target(device), spec)


def sparse_mla(
    q: torch.Tensor,
    rows: NamedRows,
    selection: SparseMlaSelection,
    *,
    scale: float,
    extra: NamedRows | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
    scratch: SplitScratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token to the rows that its index lists name; a row is key and value.

    For each query token and head, over the named rows k of both caches::

        s = scale (q . k);  out = sum_k softmax(s)_k k

    The host never waits for the GPU: the lists and their lengths are read on the device.

    Args:
        q: ``[requests, query tokens, heads, 512]`` bf16, any stride between heads, and one between
            the query tokens of all requests; so have the index lists.
        rows: the cache and its index lists: in DeepSeek-V4 the last 128 tokens.
        selection: the layer's paths (``select_sparse_mla``).
        scale: the factor of the logits.
        extra: a second cache with lists of its own: in DeepSeek-V4 the compressed tokens.
        sinks: ``[heads]`` float32 natural logits that take a share of the weights and no part in
            the LSE; -inf has no effect, +inf gives output 0.
        out: ``[requests, query tokens, heads, 512]`` bf16; lse: ``[requests, query tokens, heads]``
            float32; where to write the results, contiguous.
        splits: how many programs share each token's rows; by default as many as fill the GPU, or
            all share those of all tokens equally.
        scratch: the memory for splits; by default the device's own.

    Returns:
        (out, lse); lse is the natural log-sum-exp of the logits. A token whose lists name nothing
        has output 0 and lse +inf.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
    """
    if is_elsewhere(q):
        return run_there(q, sparse_mla, locals())
    scale = number("scale", scale)  # a tensor is no part of what calls agree in
    extra_rows = None if extra is None else (extra.cache, extra.indices, extra.lengths)
    tensors = (q, (rows.cache, rows.indices, rows.lengths), extra_rows, sinks)
    run, layout = _ready(selection, *tensors, out, lse, scale, splits)
    check_addresses(rows, extra)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if run is not None:
        programs, *numbers = layout
        x = SparseMlaInputs(selection.spec, q, rows, extra, scale, sinks, out, lse, *numbers)
        run(x, scratch_of_call(scratch, q.device), programs)
    return out, lse


@once
def _ready(
    selection: SparseMlaSelection,
    q: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    extra: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    scale: float,
    splits: int | None,
) -> tuple[SparseRun | None, tuple[int, ...]]:
    """A call's path, bound, and the numbers that it runs with; no path where there is no token."""
    lists = [NamedRows(*given) for given in (rows, extra) if given is not None]
    named = (lists[0], lists[1] if extra is not None else None)
    check_sparse_mla(selection.spec, q, *named, scale, sinks, out, lse)
    if splits is not None and not 1 <= splits <= 160:
        raise ValueError(f"splits must be 1 to 160, got {splits}")
    tokens = q.shape[0] * q.shape[1]
    if not tokens:
        return None, ()
    selection.expect_device("q", q)
    run = selection.run(tokens)
    if splits is None or selection.spec.cache_format == "bf16_rows":
        splits = run.splits(tokens, tuple(given.topk for given in lists))
    strides = [token_stride(x) for x in (q, *(given.indices for given in lists))]
    return run, (splits, tokens, q.shape[1], *strides, 0)[:6]
