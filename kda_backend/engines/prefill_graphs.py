"""The sizes of prefill steps that run in CUDA graphs, the same rule for both engines.

A step that is not captured takes as long as the host needs to launch it. That time depends on the
number of layers and hardly on the tokens; the GPU's own work grows with the tokens and shrinks with
the number of ranks that share it. So a step is captured up to the length whose work hides the host.
"""

from __future__ import annotations

HIDDEN_SIZE, TOKENS_OF_A_RANK = 2304, 2048
"""Kimi-Linear-48B on one H200: from so many tokens on a step is bound by the GPU. The work of a
layer is taken to grow with the square of the hidden size, and to be shared equally by the ranks."""
SIZES: tuple[int, ...] = (
    *(8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *range(2560, 16385, 512),
)
"""Tokens of the graphs. A step is padded to the next one: up to 2,048 tokens reading the weights
takes most of its time, and beyond it each token costs."""


def most_tokens(hidden_size: int, ranks: int, budget: int) -> int:
    """The tokens of the largest prefill step that is worth a CUDA graph.

    It is one of `SIZES`, or all that the engine puts into a step.

    Args:
        hidden_size: of the model.
        ranks: GPUs that share the work of each layer.
        budget: the most tokens that the engine puts into a step.
    """
    tokens = TOKENS_OF_A_RANK * ranks * HIDDEN_SIZE**2 // hidden_size**2
    if tokens >= budget:
        return budget
    return max((size for size in SIZES if size <= tokens), default=SIZES[0])


def sizes(most: int) -> list[int]:
    """The sizes up to ``most`` tokens, which is the largest of them."""
    return [*(size for size in SIZES if size < most), most]
