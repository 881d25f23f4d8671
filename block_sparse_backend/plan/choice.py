"""The choice of blocks that a prediction keeps, for all heads or for each."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from block_sparse_backend import masks

PerHead = float | Tensor
"""A number for all heads, or a tensor [H] with one for each."""


class ChoiceKind(NamedTuple):
    """A `Choice` but for its numbers: what kernels are compiled for.

    Attributes:
        is_cdf: a sum is given, else a share.
        has_likeness: a head may ask for likenesses.
        per_head: heads have numbers of their own.
    """

    is_causal: bool
    keep_first: bool
    is_cdf: bool
    has_likeness: bool
    per_head: bool

    @property
    def mask(self) -> masks.Mask:
        """The mask of PARTIAL blocks."""
        return masks.causal if self.is_causal else masks.everything

    def has_partial(self, kv_len: int, block_n: int) -> bool:
        """Whether a plan for so many keys may have PARTIAL blocks."""
        return self.is_causal or kv_len % block_n != 0


@dataclass(frozen=True)
class Choice:
    """The blocks that a prediction keeps.

    ``cdf``, ``topk`` and ``min_likeness`` are one number, or a tensor [H] with one for each query
    head. The values of a tensor on a GPU are taken on trust; one on the host is copied to the
    device, which no capture allows.

    Attributes:
        cdf: blocks, largest first, until their pooled softmax sums to this; or
        topk: this share of the blocks that a tile may see, at least one.
        min_likeness: a block is kept, with its whole row or column of the map, if the mean cosine
            between its tokens is not above this. The mean is never below 0, so a negative value
            keeps no block for this reason and saves reading the keys once.
        is_causal: aligned to the bottom right; blocks that the diagonal cuts are kept.
        keep_first: keep the first block of keys (the attention sink).

    Raises:
        ValueError: not exactly one of ``cdf`` and ``topk`` is given, or it is not in (0, 1]; or a
            tensor has another number of dimensions than 1.
    """

    cdf: PerHead | None = None
    topk: PerHead | None = None
    min_likeness: PerHead = -0.1
    is_causal: bool = False
    keep_first: bool = False

    def __post_init__(self) -> None:
        if (self.cdf is None) == (self.topk is None):
            raise ValueError(
                f"exactly one of cdf and topk must be given, got {self.cdf} and {self.topk}"
            )
        for name in ("cdf", "topk", "min_likeness"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Real | Tensor):
                raise ValueError(
                    f"{name} must be a number or a tensor of one for each head, got {given!r}"
                )
        for name, given in self._tensors().items():
            if given.dim() != 1:
                raise ValueError(f"{name} must have shape [heads], got {list(given.shape)}")
        amount = self.amount
        if isinstance(amount, Tensor):
            is_good = not amount.is_cpu or bool(((amount > 0) & (amount <= 1)).all())
        else:
            is_good = 0.0 < amount <= 1.0
        if not is_good:
            got = amount.tolist() if isinstance(amount, Tensor) else amount
            raise ValueError(f"cdf and topk must be above 0 and at most 1, got {got}")

    @property
    def amount(self) -> PerHead:
        """``cdf`` or ``topk``."""
        amount = self.topk if self.cdf is None else self.cdf
        assert amount is not None
        return amount

    @property
    def goal(self) -> PerHead:
        """``amount``; but a sum of 1 is all blocks, whatever their rounding."""
        if isinstance(self.cdf, Tensor):
            return torch.where(self.cdf == 1.0, 2.0, self.cdf)
        return 2.0 if self.cdf == 1.0 else self.amount

    @property
    def kind(self) -> ChoiceKind:
        """The kind of choice; thresholds on a GPU are not read, and ask for likenesses."""
        given = self.min_likeness
        if isinstance(given, Tensor):
            has_likeness = not given.is_cpu or bool((given >= 0.0).any())
        else:
            has_likeness = given >= 0.0
        is_cdf, per_head = self.cdf is not None, bool(self._tensors())
        return ChoiceKind(self.is_causal, self.keep_first, is_cdf, has_likeness, per_head)

    def check_heads(self, heads: int) -> None:
        """
        Raises:
            ValueError: a tensor has not one number for each of the query heads.
        """
        for name, given in self._tensors().items():
            if len(given) != heads:
                raise ValueError(
                    f"{name} must have one number for each of {heads} heads, got {len(given)}"
                )

    def of_heads(self, heads: int, device: torch.device) -> Tensor | None:
        """float32 [2, H] on the device, ``min_likeness`` and ``goal`` of each head; ``None`` where
        all heads have the same."""
        if not self._tensors():
            return None
        rows = [
            x.to(device, torch.float32)
            if isinstance(x, Tensor)
            else torch.full((heads,), x, dtype=torch.float32, device=device)
            for x in (self.min_likeness, self.goal)
        ]
        return torch.stack(rows)

    def _tensors(self) -> dict[str, Tensor]:
        given = {name: getattr(self, name) for name in ("cdf", "topk", "min_likeness")}
        return {name: x for name, x in given.items() if isinstance(x, Tensor)}
