"""One case of what is executed, and how its answer is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend_core.target import Target

CPU = torch.device("cpu")
Answer = tuple[float, float]
"""(error, allowed error)."""


@dataclass(frozen=True)
class ExecutionCase:
    """One or a few launches.

    Attributes:
        name: family, operator, path, and the case.
        run: for a target, returns (error, allowed error); raising is a failure too.
        is_large: compiled for tensors beyond 2 GiB.
        is_quick: runs in a few seconds and covers what its kernels do.
    """

    name: str
    arch: str
    run: Callable[[Target], Answer]
    is_large: bool = False
    is_quick: bool = False


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2; not finite where anything is not."""
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


def worse(*answers: Answer) -> Answer:
    return max(answers, key=lambda answer: answer[0] / answer[1])
