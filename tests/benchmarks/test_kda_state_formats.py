"""Errors of states by their format: the script on the CPU, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import kda_state_formats

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="in small on the CPU")


def test_formats_differ_as_their_mantissas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kda_state_formats, "BLOCK", 64)
    monkeypatch.setattr(kda_state_formats, "PREFILLED", 48)
    output = tmp_path / "rows.json"
    kda_state_formats.main(["--steps", "64", "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    found = {(row["calls"], row["regime"], row["format"]): row for row in rows}
    assert len(found) == len(rows) == 2 * len(kda_state_formats.REGIMES) * 3
    for regime in kda_state_formats.REGIMES:
        fp32, bf16, fp16 = (found["decode", regime, name] for name in kda_state_formats.FORMATS)
        for error in ("output_error", "state_error"):
            assert fp32[error] < 1e-5
            assert 4.0 < bf16[error] / fp16[error] < 16.0
        assert fp16["output_error"] < 3e-3
