"""Sparse MLA's paths: a module for each, whose `bind` returns a `SparseRun`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mla_backend.contract.sparse_mla import SparseMlaInputs
    from mla_backend.scratch import SplitScratch


class SparseRun(Protocol):
    """One path, bound to a kind of layer."""

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        """Run a checked call, whose tokens' rows are shared by ``splits`` programs each, or with 0
        by all programs equally."""

    def splits(self, tokens: int, topks: tuple[int, ...]) -> int:
        """Programs that share the rows of each of so many query tokens, whose lists have so many
        entries; 0 if all share them equally. Rows of bf16 are not split."""

    def scratch_rows(self, tokens: int, splits: int) -> int:
        """Rows of 512 float32 that such a call takes of the scratch memory."""

    def variant(self, tokens: int, splits: int) -> tuple[int, ...]:
        """The constants for which the kernels of such a call are compiled."""


class WholeTokens:
    """The paths by which no token's rows are shared."""

    def splits(self, tokens: int, topks: tuple[int, ...]) -> int:
        return 1

    def scratch_rows(self, tokens: int, splits: int) -> int:
        return 0

    def variant(self, tokens: int, splits: int) -> tuple[int, ...]:
        return ()
