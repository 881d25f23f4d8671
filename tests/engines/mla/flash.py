"""What stands in for the engines' compiled MLA kernels on a CPU, and the targets of their tests."""

from __future__ import annotations

from typing import Any

import torch

from backend_core.target import KNOWN_TARGETS, Target

TOLERANCE = 8e-3
TARGETS = {
    "torch": KNOWN_TARGETS["cpu"],
    "triton": Target("nvidia", "sm80", 5, "an A100 of five SMs, interpreted"),
}


class FlashMla:
    """In the place of FlashMLA's functions: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **call: Any) -> Any:
        self.calls.append(call)
        out = call["out"] if "out" in call else torch.zeros_like(call["q"])
        return (out,) * (2 if "k_cache" in call else 3)


def attend_pages(
    q: torch.Tensor,
    q_latent: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    lengths: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """FlashAttention 3's decode of MLA in float64: ``[tokens, heads, 512]``.

    Args:
        q: the queries' RoPE part, ``[tokens, heads, 64]``; ``q_latent`` the other.
        caches: of RoPE and latent parts, ``[pages, page size, 1, channels]``.
        bounds: of each request's tokens, which are causal, ``[requests + 1]``.
    """
    out = torch.zeros_like(q_latent)
    ends = bounds.tolist()
    for request, length in enumerate(lengths.tolist()):
        tokens = range(ends[request], ends[request + 1])
        own = pages[request, : -(-length // caches[0].shape[1])].long()
        rope, latent = (cache[own].flatten(0, 1)[:length, 0].double() for cache in caches)
        for token in tokens:
            seen = length - (tokens.stop - 1 - token)
            s = q[token].double() @ rope[:seen].T + q_latent[token].double() @ latent[:seen].T
            out[token] = ((s * scale).softmax(-1) @ latent[:seen]).to(out.dtype)
    return out
