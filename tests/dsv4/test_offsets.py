"""Offsets past 2^31 elements, in sparse files: only what is touched takes memory or disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4_backend import SeqLens, compress_decode_, compress_norm_rope_hadamard_
from dsv4_backend.compressor.in_place import in_torch
from tests.dsv4.cases import (
    DEVICE,
    TARGET,
    Engine,
    assert_records,
    expected_rows,
    make_history,
    make_layer,
    make_spec,
    rope_table,
)

pytestmark = pytest.mark.interpreter  # maps files into CPU memory

FAR = 2**31 + 64


def far_apart(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, mapped from a sparse file, whose first dimension strides by over 2^31 elements."""
    size = (shape[0] - 1) * FAR + torch.Size(shape[1:]).numel()
    file = directory / f"{len(list(directory.iterdir()))}.sparse"
    buffer = torch.from_file(str(file), shared=True, size=size, dtype=dtype)
    strides = [1]
    for extent in reversed(shape[2:]):
        strides.insert(0, strides[0] * extent)
    return buffer.as_strided(shape, (FAR, *strides))


def test_rows(tmp_path: Path) -> None:
    kv = far_apart(tmp_path, (2, 128), torch.bfloat16)
    kv.copy_(torch.randn(2, 128))
    want, weight, table = kv.contiguous(), torch.ones(128, device=DEVICE), rope_table()
    plan = SeqLens(torch.tensor([4, 8], device=DEVICE))
    in_torch(want, weight, 1e-6, table, plan.seq_lens, compress_ratio=4, rotate=True)
    options = {"head_dim": 128, "compress_ratio": 4, "rotate": True}
    compress_norm_rope_hadamard_(kv, weight, 1e-6, table, plan, **options, target=TARGET)
    torch.testing.assert_close(kv.float(), want.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("cache_format", "layout"),
    [("indexer_fp8", "ring"), ("indexer_fp8", "paged"), ("fp8_two_pools", "ring")],
)
def test_inputs_states_and_caches(cache_format: str, layout: str, tmp_path: Path) -> None:
    spec = make_spec(cache_format)
    layer, engine = make_layer(spec), Engine(layout, spec, [8, 8])
    histories = [make_history(spec, 8, seed) for seed in (1, 2)]
    # Only the pages that are touched are filled.
    near_state, near_caches = engine.state, engine.caches
    engine.state = far_apart(tmp_path, tuple(near_state.shape), torch.float32)
    engine.state.copy_(near_state)
    far = [far_apart(tmp_path, tuple(near.shape), torch.uint8).copy_(near) for near in near_caches]
    engine.cache, engine.second_cache = (*far, None)[:2]
    kv_score = far_apart(tmp_path, (2, spec.row_width), torch.float32)
    for request, history in enumerate(histories):
        engine.fill_state(layer, request, history[:-1])
        kv_score[request] = history[-1]
    plan = engine.decode_plan([(0, 8), (1, 8)])
    tensors = (layer, kv_score, engine.state, engine.cache, plan)
    compress_decode_(*tensors, second_cache=engine.second_cache, target=TARGET)
    near_caches = tuple(cache.contiguous() for cache in engine.caches)
    engine.cache, engine.second_cache = (*near_caches, None)[:2]
    want = {engine.slot(r, 8): expected_rows(layer, h)[-1] for r, h in enumerate(histories)}
    assert_records(engine, layer, want)
    for request, history in enumerate(histories):
        expected = engine.expected_row(layer, history[-1], 7)
        assert torch.equal(engine.state[engine.locate(request, 7)], expected)
