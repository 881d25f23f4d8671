"""Sliding tiles and token orders, token by token beside their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backend_core.testing.numerics import relative_error
from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan.sliding_tile import sliding_tile
from block_sparse_backend.plan.token_order import Box, tile_order
from block_sparse_backend.testing.cases import elements_seen, inputs
from block_sparse_backend.video import VideoAttention
from tests.block_sparse.results import assert_matches

CPU = torch.device("cpu")
boxes = st.tuples(*(st.integers(1, 9) for _ in range(3)))


def seen_of(canvas: Box, tile: Box, window: Box, text: int, even: str | None = None) -> Tensor:
    """bool [tokens, tokens] by the rule of FastVideo's tests; ``exact`` drops an even window's
    last tile."""
    near = []
    for length, size, count in zip(canvas, tile, window, strict=True):
        tiles = -(-length // size)
        half = count // 2
        upper = half - 1 if count % 2 == 0 and even == "exact" else half
        row = torch.ones(length, length, dtype=torch.bool)
        for i in range(length):
            for j in range(length):
                if half + upper + 1 < tiles:
                    centre = min(max(i // size, half), tiles - 1 - upper)
                    row[i, j] = -half <= j // size - centre <= upper
        near.append(row)
    t, h, w = near
    video = t[:, None, None, :, None, None] & h[None, :, None, None, :, None]
    video = (video & w[None, None, :, None, None, :]).flatten(3).flatten(0, 2)
    return torch.nn.functional.pad(video, (0, text, 0, text), value=True)


@settings(max_examples=20, deadline=None)
@given(boxes, st.tuples(*(st.integers(1, 4) for _ in range(3))), boxes, st.integers(0, 40))
def test_plan(canvas: Box, tile: Box, window: Box, text: int) -> None:
    if canvas[0] * canvas[1] * canvas[2] > 200:
        canvas = (canvas[0], 4, 4)
    order = tile_order(canvas, tile, text=text, block=32, device=CPU)
    assert torch.equal(order.index[order.slot_of], torch.arange(len(order.slot_of)))
    for even in ("wide", "exact"):
        plan = sliding_tile(order, [window], 1, even_windows=even, block_m=32, block_n=32)
        seen = elements_seen(plan)[0]
        assert not bool(seen[:, ~order.is_token].any())
        of_tokens = seen[order.slot_of][:, order.slot_of]
        assert torch.equal(of_tokens, seen_of(canvas, tile, window, text, even))


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_heads_with_windows_of_their_own(path: str, seed: int, device: torch.device) -> None:
    canvas, tile, text = (4, 6, 7), (2, 4, 4), 10
    windows = [(3, 3, 3), (1, 2, 1)]
    order = tile_order(canvas, tile, text=text, block=32, device=device)
    tokens = 4 * 6 * 7 + text
    q, k, v = inputs((2, tokens, 64), (2, tokens, 64), seed=seed, device=device)
    plan = sliding_tile(order, windows, 2, even_windows="exact", block_m=32, block_n=32)
    out, lse = block_sparse_attention(*(order.gather(x, 2) for x in (q, k, v)), plan, path=path)
    seen = torch.stack([seen_of(canvas, tile, w, text, "exact") for w in windows])
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, 0.125)
    assert_matches((order.scatter(out, 2), order.scatter(lse, 2)), want)


def test_8_bit_values_of_cut_tiles_are_as_near_as_of_whole_ones(seed: int) -> None:
    """Tiles of up to 32 tokens in 64 slots: what rounding makes up is the error of tokens, not that
    of empty slots, which would be the same in each of them."""
    generator = torch.Generator().manual_seed(seed)
    canvas = (5, 6, 7)
    q, k, v = (torch.randn(1, 210, 2, 64, generator=generator).bfloat16() for _ in range(3))
    attend = VideoAttention("sliding_tile", canvas=canvas, tile=(2, 4, 4), windows=((9, 9, 9),))
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    assert relative_error(attend(q, k, v), want) < 3.5e-2


def test_sizes_that_are_none_are_named() -> None:
    order = tile_order((4, 4, 4), (1, 1, 1), block=32, device=CPU)
    for sizes, message in (
        ({"canvas": (4, 6)}, r"canvas must be three positive integers .* got \(4, 6\)"),
        ({"tile": (0, 3, 4)}, r"tile must be three positive integers .* got \(0, 3, 4\)"),
        ({"block": 0}, "block must be a whole number of at least 1, got 0"),
        ({"text": 1.5}, "text must be a whole number of at least 0, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            tile_order(**{"canvas": (4, 6, 7), "tile": (2, 3, 4), "device": CPU, **sizes})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"each of windows must be three positive integers"):
        sliding_tile(order, ((1, 1),), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block_m must be a whole number of at least 1, got 0"):
        sliding_tile(order, ((1, 1, 1),), 2, block_m=0)


def test_even_windows_are_decided_by_the_caller() -> None:
    order = tile_order((4, 4, 4), (1, 1, 1), block=32, device=CPU)
    with pytest.raises(ValueError, match='even_windows must be "wide" or "exact"'):
        sliding_tile(order, [(3, 2, 3)], 1, block_m=32, block_n=32)
    with pytest.raises(ValueError, match="windows must be 1 or 2, got 3"):
        sliding_tile(order, [(3, 1, 3)] * 3, 2, block_m=32, block_n=32)
    with pytest.raises(ValueError, match="multiple of 64 and 32, got 32"):
        sliding_tile(order, [(3, 1, 3)], 2, block_m=64, block_n=32)
