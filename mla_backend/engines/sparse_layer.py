"""Choice and calls of sparse MLA for an engine's DeepSeek-V4 layers.

Imports no engine. An adapter makes one `SparseLayer` for layers that are alike, as they are built,
and hands it what the engine would hand to FlashMLA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend_core.engines.log import chosen
from backend_core.target import Target
from mla_backend.beside import Beside, result_file, select_beside, sizes_in_words
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.scratch import SplitScratch
from mla_backend.sparse_mla import SparseMlaSelection, sparse_mla
from mla_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

FLASHMLA = "flashmla"
"""The path tables' name of what engines run these layers with on Hopper."""
MIN_WIDTH = 128
"""Entries of the shortest lists that an engine makes for a compressed cache."""


def sparse_paths(
    target: Target, heads: int, page_size: int = 64, extra_page_size: int = 64
) -> Beside[str, SparseMlaSpec]:
    """The paths, by number of query tokens, of ``"decode"`` over caches of records and of
    ``"prefill"`` over gathered rows of bf16; both are refused where `SparseMlaSpec` does."""
    try:
        records = SparseMlaSpec(heads, page_size=page_size, extra_page_size=extra_page_size)
        specs = {"decode": records, "prefill": SparseMlaSpec(heads, "bf16_rows")}
    except ValueError as error:
        return Beside({}, dict.fromkeys(("decode", "prefill"), str(error)))
    return select_beside("sparse_mla", target, specs, FLASHMLA)


def runs_all(paths: Beside[str, SparseMlaSpec]) -> bool:
    """Whether every call runs here, so that no other kernel ever sees the queries."""
    return not paths.refused and all(s.sizes == ((1, None),) for s in paths.served.values())


def calls_in_words(phase: str, selection: SparseMlaSelection) -> str:
    """The calls of a phase that run here."""
    sizes = sizes_in_words(selection)
    return f"{phase}s" if sizes.startswith("any") else f"{phase}s of {sizes} query tokens"


@dataclass(frozen=True)
class LayerShape:
    """Properties of layers that are alike.

    Attributes:
        heads: of the queries as the kernels get them, the engine's padding included.
        page_size, extra_page_size: rows of a page of the window's and of the compressed cache; 0
            for the latter where a layer attends to its window alone.
        topks: the most entries of a token's two lists, or of its one.
        max_tokens: the most query tokens of a call of decode.
    """

    heads: int
    page_size: int
    extra_page_size: int
    topks: tuple[int, ...]
    max_tokens: int


class SparseLayer:
    """Sparse MLA in the place of an engine's kernels, for layers of one form.

    Whether a call runs here follows from its number of query tokens alone, which a CUDA graph is
    captured for; everything else that differs from batch to batch is read on the device.

    Args:
        scratch: one for all layers of a model.

    Raises:
        LookupError: no call runs here.
    """

    def __init__(self, target: Target, form: LayerShape, scratch: SplitScratch) -> None:
        self.target, self.form = target, form
        self._scratch = scratch
        self.paths = sparse_paths(target, form.heads, form.page_size, form.extra_page_size)
        if not self.paths.served:
            raise LookupError(self.paths.why)

    def covers(self, phase: str, tokens: int) -> bool:
        """Whether a call of ``"decode"`` or ``"prefill"`` with so many query tokens runs here."""
        return self.paths.covers(phase, tokens)

    def describe(self, heads: int) -> list[str]:
        """Lines for a log: what runs where, and the rows of the table.

        Args:
            heads: of a rank, without padding.
        """
        form = self.form
        padding = "" if form.heads == heads else f" as {form.heads}"
        sizes = " and ".join(str(size) for size in (form.page_size, form.extra_page_size) if size)
        layers = (
            f"DeepSeek-V4's attention with {heads} heads per rank{padding} over pages of {sizes}"
            " rows"
        )
        lines = []
        for phase, selection in self.paths.served.items():
            calls, source = calls_in_words(phase, selection), result_file(selection)
            facts = f"{calls} run here, where {source} has them ahead of FlashMLA"
            lines += chosen(layers, self.target, facts, selection.explained)
        for phase, why in self.paths.refused.items():
            lines += chosen(layers, self.target, f"{phase}s stay FlashMLA's: {why}")
        return lines

    def decode(
        self,
        q: torch.Tensor,
        window: NamedRows,
        extra: NamedRows | None,
        *,
        scale: float,
        sinks: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of query tokens to the rows of one or two caches of records.

        Args:
            q: ``[tokens, 1, heads, 512]`` bf16.
            window, extra: the caches, with lists for each token.
            sinks: ``[heads]`` float32; out: as q, contiguous, or ``None`` for new memory.

        Raises:
            ValueError: an input is not as `sparse_mla` takes it; nothing has been written then.
        """
        spec = SparseMlaSpec(
            self.form.heads,
            page_size=window.cache.shape[1],
            extra_page_size=0 if extra is None else extra.cache.shape[1],
        )
        return sparse_mla(
            q,
            window,
            self.paths.served["decode"].for_spec(spec),
            scale=scale,
            extra=extra,
            sinks=sinks,
            out=out,
            scratch=self._scratch,
        )[0]

    def prefill(
        self,
        q: torch.Tensor,
        rows: NamedRows,
        *,
        scale: float,
        sinks: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of query tokens ``[tokens, 1, heads, 512]`` to gathered rows of bf16.

        Raises:
            ValueError: an input is not as `sparse_mla` takes it; nothing has been written then.
        """
        selection = self.paths.served["prefill"]
        return sparse_mla(
            q, rows, selection, scale=scale, sinks=sinks, out=out, scratch=self._scratch
        )[0]

    def warm_up(self, device: torch.device) -> None:
        """Compile and load every kernel of the form, and take the memory of its largest step.

        Runs one call of each variant, on caches of one page, on the current stream.
        """
        most = 0
        variants: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for tokens in range(1, self.form.max_tokens + 1):
            if not self.covers("decode", tokens):
                continue
            selection = self.paths.served["decode"]
            run, row = selection.run(tokens), selection.row(tokens)
            for topks in self._widths():
                splits = run.splits(tokens, topks)
                most = max(most, run.scratch_rows(tokens, splits))
                variant = (id(row), *run.variant(tokens, splits))
                variants.setdefault(variant, (tokens, topks))
        if most:
            self._scratch.reserve(most, 1, HEAD_DIM)
        for tokens, topks in variants.values():
            self._decode_nothing(tokens, topks, device)
        if self.covers("prefill", 1):
            self._prefill_nothing(device)

    def _widths(self) -> list[tuple[int, ...]]:
        """The lists' widths: an engine may give those of short contexts half, a quarter, ..."""
        if not self.form.extra_page_size:
            return [self.form.topks]
        window, extra = self.form.topks
        shorter = [extra >> n for n in range(1, extra.bit_length()) if extra >> n >= MIN_WIDTH]
        return [(window, width) for width in (extra, *shorter)]

    def _decode_nothing(self, tokens: int, topks: tuple[int, ...], device: torch.device) -> None:
        caches: list[NamedRows] = []
        sizes = (self.form.page_size, self.form.extra_page_size)[: len(topks)]
        for size, topk in zip(sizes, topks, strict=True):
            page = torch.zeros(1, -(-size * 584 // 576) * 576, dtype=torch.uint8, device=device)
            indices = torch.full((tokens, 1, topk), -1, dtype=torch.int32, device=device)
            lengths = torch.zeros(tokens, dtype=torch.int32, device=device)
            cache = page.as_strided((1, size, 584), (page.stride(0), 584, 1))
            caches.append(NamedRows(cache, indices, lengths))
        q, sinks = self._queries(tokens, device)
        extra = caches[1] if len(caches) > 1 else None
        self.decode(q, caches[0], extra, scale=1.0, sinks=sinks, out=None)

    def _prefill_nothing(self, device: torch.device) -> None:
        q, sinks = self._queries(1, device)
        indices = torch.full((1, 1, 128), -1, dtype=torch.int32, device=device)
        lengths = torch.zeros(1, dtype=torch.int32, device=device)
        rows = NamedRows(q.new_zeros(64, HEAD_DIM), indices, lengths)
        self.prefill(q, rows, scale=1.0, sinks=sinks, out=None)

    def _queries(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.zeros(tokens, 1, self.form.heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        return q, torch.zeros(self.form.heads, dtype=torch.float32, device=device)
