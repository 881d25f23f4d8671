"""KDA's one-launch prefill from its own source on the CPU (tools/cuda_on_host)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend.prefill import one_launch_sm90 as in_one
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import PrefillVariant
from kda_backend.prefill.one_launch_sm90 import Launch
from tests.kda.cases import Backend
from tests.kda.prefill_on_host import ROWS
from tools.cuda_on_host.driver import HostKernel

ON = ROWS["one_launch_sm90"]
"""The table's row, for sequences of at most a chunk."""
CPU = Backend("kernels", torch.device("cpu"))


class Sources:
    """Stands in for what is compiled for a GPU.

    Attributes:
        launches: that were made.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.launches: list[Launch] = []

    def kernels(self, variant: PrefillVariant) -> dict[tuple[int, int], HostKernel]:
        made = _Kernels()
        made.build = lambda rows, ctas: HostKernel(
            self.folder / "one_launch.cu",
            "one_launch",
            in_one.params_of(variant),
            in_one.defines(rows, ctas, variant),
            run_seed=self.seed,
        )
        return made


class _Kernels(dict[tuple[int, int], HostKernel]):
    build: Any

    def __missing__(self, key: tuple[int, int]) -> HostKernel:
        return self.build(*key)


def use_one_launch(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    *,
    sources: Path = pipeline.KERNELS,
    rows: int | None = None,
    split: bool = False,
    ctas: int = 2,
) -> Sources:
    """Every call of the path runs in one launch on the CPU.

    Args:
        sources: of the kernel.
        rows: of a chunk; by default what the step's lengths need.
        split: each half of the value rows has a CTA.
        ctas: at most so many, so that each takes one task after another.
    """
    made = Sources(sources, seed)
    choose = in_one.choose_launch

    def launch_of(longest: int, tasks: int, sms: int) -> Launch:
        chosen = choose(longest, tasks, sms)
        tasks = 2 * tasks if split else tasks
        launch = Launch(rows or chosen.rows, 1, split, min(ctas, tasks))
        made.launches.append(launch)
        return launch

    monkeypatch.setattr(
        in_one.OneLaunchSm90, "kernels", lambda path, variant: made.kernels(variant)
    )
    monkeypatch.setattr(in_one, "choose_launch", launch_of)
    return made


def case_of(seed: int, lengths: Sequence[int], **model: Any) -> Any:
    return CPU.case(seed, lengths, key_dim=128, value_dim=128, **model)
