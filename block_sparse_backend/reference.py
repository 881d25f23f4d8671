"""Attention over some of the elements in float64, written plainly.

LSE is natural; a query that sees nothing has output 0 and LSE -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the elements that ``seen`` has.

    Args:
        q, k, v: [..., H, M, D], [..., Hkv, N, D] and [..., Hkv, N, DV].
        seen: bool, broadcastable to [..., H, M, N].

    Returns:
        Output [..., H, M, DV] and LSE [..., H, M], float64.
    """
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    s = scale * (q @ k.transpose(-1, -2))
    s = torch.where(seen, s, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return p @ v, lse
