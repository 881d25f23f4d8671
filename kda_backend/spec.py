"""A KDA layer: the facts that its contract, its kernels and their launches share."""

from __future__ import annotations

from enum import IntEnum

CHUNK = 64
"""Tokens of a prefill chunk."""
MAX_HEAD_DIM = 256
"""The largest K and V of the prefill and recurrent operators."""
MAX_STEP_DIM = 128
"""The largest K and V of the decode step: one program holds the state of a head."""
CONV_TAPS = 4
"""Taps of the short convolution; its window holds the last three inputs of a channel."""


def tile_width(key_dim: int) -> int:
    """The width of a prefill kernel's rows of K channels: a power of 2, at least 64."""
    return max(64, 1 << (key_dim - 1).bit_length())


class Gate(IntEnum):
    """How ``g`` becomes a decay; the values of the kernels' GATE."""

    __hash__ = int.__hash__  # IntEnum's is a Python function, and every call hashes these

    LOG = 0  # g is the natural logarithm of the decay
    SOFTPLUS = 1  # log decay = -exp(A_log) softplus(g + dt_bias)
    BOUNDED = 2  # log decay = lower_bound sigmoid(exp(A_log) (g + dt_bias))


class Beta(IntEnum):
    """How ``beta`` becomes a step size; the values of the kernels' BETA."""

    __hash__ = int.__hash__

    GIVEN = 0  # beta is the step size
    SIGMOID = 1
    TWICE_SIGMOID = 2  # eigenvalues of the transition in (-1, 1)
