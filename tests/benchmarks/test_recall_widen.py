"""A recall checkpoint with more heads computes the same function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backend_core.testing.numerics import relative_error
from benchmarks.recall.widen import RECALL, widen
from kda_backend.engines.transformers import load_model


def test_a_checkpoint_with_more_heads_gives_the_same_logits(tmp_path: Path) -> None:
    widen(RECALL / "checkpoint", tmp_path / "wide", 8)
    device = torch.device("cpu")
    tokens = torch.randint(0, 256, (1, 90), generator=torch.Generator().manual_seed(1))
    logits = []
    for folder in (RECALL / "checkpoint", tmp_path / "wide"):
        model = load_model(folder, device)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert model.config.num_attention_heads == 8
    assert relative_error(logits[1], logits[0]) < 1e-5


def test_heads_that_cannot_be_copied_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="heads must be a multiple of 2, got 5"):
        widen(RECALL / "checkpoint", tmp_path / "wide", 5)
    assert not (tmp_path / "wide").exists()
