"""The properties of a call's tokens that its Triton kernels are compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kda_backend.contract.values import GateSpec, TokenInputs
from kda_backend.spec import Beta, Gate

TYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The values of ``DT_STATE`` and its like, which the Hopper kernels are compiled with."""
_IS_HIP = torch.version.hip is not None


def has_ptx(x: torch.Tensor) -> bool:
    """Whether kernels on a tensor are compiled for an NVIDIA GPU."""
    return x.is_cuda and not _IS_HIP


class TokenSpec(NamedTuple):
    """Sizes of a head, and how gate, step size and keys are read; made by `of`.

    Attributes:
        has_ptx: compiled for an NVIDIA GPU: with approximate exp2 and log2 instructions, and
            products with fp32 inputs as three of TF32.
        heads_per_key: value heads per key head.
    """

    has_ptx: bool
    heads_per_key: int
    key_dim: int
    value_dim: int
    gate: Gate
    beta: Beta
    l2norm: bool

    @classmethod
    def of(cls, tokens: TokenInputs, gate: GateSpec) -> TokenSpec:
        q, v = tokens.q, tokens.v
        heads, key_dim = q.shape[-2:]
        value_heads, value_dim = v.shape[-2:]
        sizes = (value_heads // heads, key_dim, value_dim)
        return cls(has_ptx(q), *sizes, gate.kind, tokens.beta_kind, tokens.l2norm)

    def constexprs(self) -> dict[str, Any]:
        return {
            "HEADS_PER_KEY": self.heads_per_key,
            "K": self.key_dim,
            "V": self.value_dim,
            "GATE": int(self.gate),
            "BETA": int(self.beta),
            "L2NORM": self.l2norm,
            "FAST_MATH": self.has_ptx,
        }


def in_one_layout(tokens: TokenInputs) -> TokenInputs:
    """The tokens with rows of q, k and g at multiples of 16 bytes and of 16 elements, copied where
    they are not, as a single row of a wide projection may be and several are not.

    Triton compiles a kernel for each, and the order in which it adds up a row follows from that.
    """
    q, k, g = (_in_one_layout(x) for x in (tokens.q, tokens.k, tokens.g))
    return tokens._replace(q=q, k=k, g=g)


def _in_one_layout(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-2] * x.shape[-1]
    if (x.stride(-3) | width) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
