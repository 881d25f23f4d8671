"""What serving launches has been compiled when the model was loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from backend_core.launch.triton import KernelLaunch
from kda_backend.engines import sglang_layer
from tests.engines.kda.sglang.harness import (
    Served,
    kernels_of_an_a100,
    leave_out_upstreams_kernels,
)
from tests.engines.kda.sglang.test_drafts import DRAFT, drafts, options, ragged
from tests.engines.kda.sglang.test_layer import tokens
from tests.engines.launches import Variant, variant

# tokens of each request, tokens before them, requests whose state the prefix cache wants
PREFILLS: list[tuple[list[int], list[int], list[tuple[int, int]]]] = [
    ([64], [0], []),
    ([512], [0], []),
    ([1], [9], []),
    ([16], [0], []),
    ([70, 1, 5], [0, 64, 3], []),
    ([70, 64, 20], [0, 64, 0], [(0, 8), (1, 10)]),
    ([17, 1, 1, 1, 100], [0, 3, 4, 5, 64], []),
]
DECODES = (1, 2, 5, 8)
# tokens of each draft; ``None`` where all have as many
DRAFTS = ((1, None), (4, None), (2, [1, 1]), (5, [4, 4, 4, 3, 1]))


@pytest.mark.parametrize("most_chunks", [None, 1])
def test_serving_launches_what_loading_has_compiled(
    most_chunks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call, and in one of each prompt, which begin at any of a step's tokens."""
    launched: set[Variant] = set()
    monkeypatch.setattr(
        KernelLaunch, "_interpret", lambda self, grid, *args: launched.add(variant(self, args))
    )
    leave_out_upstreams_kernels(monkeypatch)
    # a part whose paths are all Triton's
    monkeypatch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
    with torch.enable_grad():  # sglang loads a model with gradients on, and serves with them off
        served = Served(*options())
    served.dispatcher.extend_kernel._most_chunks = most_chunks
    with torch.no_grad():
        compiled = set(launched)
        expected = {"scan_kernel", "decode_step_kernel", "verify_step_kernel"}
        assert {key[0] for key in compiled} >= expected
        slots = [3, 1, 7, 5, 9]
        for new, prefix, tracked in PREFILLS:
            batch = served.batch(
                ForwardMode.EXTEND, new, prefix, slots[: len(new)], tracked=tracked
            )
            serve(served, batch, sum(new), launched, compiled, f"a prefill of {new}")
        for number in DECODES:
            batch = served.batch(
                ForwardMode.DECODE, [1] * number, [9] * number, [*slots, 2, 4, 6][:number]
            )
            serve(served, batch, number, launched, compiled, f"{number} decodes")
        for number, lengths in DRAFTS:
            total = DRAFT * number if lengths is None else sum(lengths)
            layout = None if lengths is None else ragged(lengths, total)
            batch = drafts(served, slots[:number], layout)
            serve(served, batch, total, launched, compiled, f"{number} drafts")


def serve(
    served: Any,
    batch: Any,
    number: int,
    launched: set[Variant],
    compiled: set[Variant],
    what: str,
) -> None:
    launched.clear()
    served.forward(tokens(number, seed=1), batch)
    assert launched
    late = launched - compiled
    assert not late, f"compiled in {what}: {sorted(map(str, late))}"
