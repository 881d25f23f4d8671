"""Sparse MLA: attention to named rows of one or two caches, as DeepSeek-V4 has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend_core.contracts import expect_kernel_device
from backend_core.launch.streams import is_elsewhere, run_there
from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PathSelection, load_table, select
from backend_core.target import Target, detect_target
from softmax_backend.contract.sparse_mla import NamedRows, SparseMlaInputs, check_sparse_mla
from softmax_backend.launch_params import TABLES
from softmax_backend.run import sparse_mla_torch, sparse_mla_triton
from softmax_backend.scratch import Scratch, scratch_of_call
from softmax_backend.spec_sparse_mla import SparseMlaSpec

Run = Callable[[KernelPath, SparseMlaInputs, Scratch, "int | None"], None]


def _gluon_sm90(path: KernelPath, x: SparseMlaInputs, scratch: Scratch, splits: int | None) -> None:
    from softmax_backend.run import sparse_mla_sm90

    sparse_mla_sm90.run(path, x, scratch, splits)


RUNS: dict[str, Run] = {
    "torch": sparse_mla_torch.run,
    "triton": sparse_mla_triton.run,
    "gluon_sm90": _gluon_sm90,
}


def _gluon_splits(*shapes: Any) -> int:
    from softmax_backend.run import sparse_mla_sm90

    return sparse_mla_sm90.splits_of(*shapes)


SPLITS: dict[str, Callable[..., int]] = {
    "torch": lambda *shapes: 1,
    "triton": sparse_mla_triton.splits_of,
    "gluon_sm90": _gluon_splits,
}


@dataclass(frozen=True, eq=False)
class SparseMlaSelection:
    """The paths chosen for one kind of layer on one target."""

    target: Target
    spec: SparseMlaSpec
    sparse_mla: PathSelection

    def path(self, tokens: int) -> KernelPath:
        """The path for so many query tokens."""
        return self.sparse_mla.lookup(tokens * self.spec.num_heads)

    def splits(self, tokens: int, topks: tuple[int, ...]) -> int:
        """Programs that share the rows of each of so many query tokens, with lists of so many
        entries over a cache of records; rows of bf16 are not split."""
        path = self.path(tokens)
        return SPLITS[path.name](path, self.spec, tokens, topks, self.target)


@functools.lru_cache(maxsize=256)
def select_sparse_mla(target: Target, spec: SparseMlaSpec) -> SparseMlaSelection:
    """Choose the paths of a layer; call it at model load.

    Raises:
        LookupError: no table for the target, or no row that can serve the spec.
    """
    table = load_table(TABLES, target)
    return SparseMlaSelection(target, spec, select(table, "sparse_mla", spec.requires()))


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
    max_logits: torch.Tensor | None = None,
    splits: int | None = None,
    scratch: Scratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token to the rows that its index lists name; a row is key and value.

    For each query token and head, over the named rows k of both caches::

        s = scale (q . k);  out = sum_k softmax(s)_k k

    The host never waits for the GPU: the lists and their lengths are read on the device.

    Args:
        q: ``[requests, query tokens, heads, 512]`` bf16, any stride between heads and tokens.
        rows: the cache and its index lists: in DeepSeek-V4 the last 128 tokens.
        selection: the layer's paths (``select_sparse_mla``).
        scale: the factor of the logits.
        extra: a second cache with lists of its own: in DeepSeek-V4 the compressed tokens.
        sinks: ``[heads]`` float32 natural logits that take a share of the weights and no part in
            the LSE; -inf has no effect, +inf gives output 0.
        out: ``[requests, query tokens, heads, 512]`` bf16; lse, max_logits: ``[requests, query
            tokens, heads]`` float32; where to write the results, contiguous. The largest scaled
            logits are written only if ``max_logits`` is given, and only for ``bf16_rows``.
        splits: how many programs share a token's rows; by default as many as fill the GPU.
        scratch: the memory for splits; by default the device's own.

    Returns:
        (out, lse); lse is the natural log-sum-exp of the logits. A token whose lists name nothing
        has output 0, lse +inf and largest logit -inf.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
    """
    if is_elsewhere(q):
        return run_there(q, sparse_mla, locals())
    x = check_sparse_mla(
        selection.spec,
        q,
        rows,
        extra,
        scale=scale,
        sinks=sinks,
        out=out,
        lse=lse,
        max_logits=max_logits,
    )
    if max_logits is not None and selection.spec.cache_format != "bf16_rows":
        raise ValueError("max_logits must be None for a cache of records")
    if splits is not None and not 1 <= splits <= 160:
        raise ValueError(f"splits must be 1 to 160, got {splits}")
    if x.tokens:
        path = selection.path(x.tokens)
        if path.name != "torch":
            expect_kernel_device("q", q)
        RUNS[path.name](path, x, scratch_of_call(scratch, q.device), splits)
    return x.out, x.lse
