"""Records of drafted tokens, which `contract.values` has among the operators' values."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Records(NamedTuple):
    """The records of drafted tokens, from which `kda_verify_step` and `kda_commit_` make the state
    after any of them; of L layers each tensor has one more dimension in front.

    With k as it came into its norm, token t changes a head's state into ``S diag(decay_t) +
    correction_t k_t^T``.

    Attributes:
        correction: ``[rows, HV, T, V]`` fp32: ``beta (v - S k / |k|) / |k|``, where |k| is 1 for a
            model that does not normalise its keys.
        key_gate: ``[rows, HV, T, 2 K]``, q's dtype: k, behind the convolution, then g as it came.
        by_norm: false for the records of vLLM's own commit, whose correction is not divided by the
            last |k|; nothing here folds them.
    """

    correction: torch.Tensor
    key_gate: torch.Tensor
    by_norm: bool = True

    @classmethod
    def empty(
        cls,
        rows: tuple[int, ...],
        max_tokens: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Records:
        """Memory for drafts of up to ``max_tokens`` tokens of ``heads`` value heads; ``rows`` is
        ``(rows,)``, or ``(layers, rows)``."""
        lead = (*rows, heads, max_tokens)
        correction = torch.empty(*lead, value_dim, dtype=torch.float32, device=device)
        return cls(correction, torch.empty(*lead, 2 * key_dim, dtype=dtype, device=device))

    def of_layer(self, layer: int) -> Records:
        """Records of one of L layers."""
        return Records(self.correction[layer], self.key_gate[layer], self.by_norm)
