"""The installed peers of block-sparse attention: loading and errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import bench_sparse_attention
from benchmarks.peers import sparse_attention as exact_peers
from benchmarks.peers import sparse_attention_packages as calls
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import FULL, from_kinds, uniform_sequences
from block_sparse_backend.plan.sliding_tile import sliding_tile
from block_sparse_backend.plan.token_order import tile_order


class FakeSage(calls.Sage2):
    """Dense attention of ours."""

    def whole(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        make = intervals.causal if is_causal else intervals.dense
        return block_sparse_attention(q, k, v, make(2048, 2048, 2, device="cpu"), path="torch")[0]

    def quantise(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return q, k, v

    def attend(self, ready: tuple[Tensor, ...], out: Tensor, is_causal: bool) -> None:
        """Misses the mask."""
        out.copy_(self.whole(*ready, False))


class FakeSparge(calls.Sparge):
    def over_map(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        kinds, sequences = (kept > 0).to(torch.int8), uniform_sequences(1, 2048, 2048, kept.device)
        plan = from_kinds(kinds, 2, sequences, 64, 128)
        return block_sparse_attention(q, k, v, plan, path="torch")[0]

    def predicted(self, *x: Tensor | float) -> Tensor:
        q, k, v = x[:3]
        return FakeSage(None).whole(q, k, v, False)  # type: ignore[arg-type]

    def ready(self, *x: Tensor) -> tuple[Tensor, ...]:
        return x

    def attend(self, ready: tuple[Tensor, ...], out: Tensor) -> None:
        """Writes nothing."""


class FakeSta(calls.Sta):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int, int]) -> Tensor:
        order = tile_order(calls.STA_CANVAS, (6, 8, 8), device="cpu")
        plan = sliding_tile(order, [self.library or window], q.shape[1])
        return block_sparse_attention(q, k, v, plan, path="torch")[0]


def test_errors_tell_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "STA_CANVAS", (6, 8, 40))

    def make(heads: int, kv_heads: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((heads, tokens), (kv_heads, tokens), (kv_heads, tokens))
        q, k, v = (torch.randn(1, *shape, 128, generator=generator) for shape in shapes)
        return q, k, v

    chosen = torch.rand(2, 32, 16, generator=torch.Generator().manual_seed(1)) < 0.5
    chosen[..., 0] = True
    found = calls.errors(
        calls.Packages(FakeSage(None), FakeSparge(None), FakeSta(None)), make, chosen
    )
    right = {"SageAttention2", "SageAttention2 causal", "SageAttention2, kernel alone",
             "SpargeAttn", "ThunderKittens"}  # fmt: skip
    assert {name for name, error in found.items() if error < 1e-5} == right
    assert found["SageAttention2, kernel alone causal"] > 0.3
    assert found["SpargeAttn causal, every block"] > 0.3
    assert found["SpargeAttn, kernel alone"] != found["SpargeAttn, kernel alone"]  # NaN
    wrong = calls.Packages(sage2=FakeSage(None), sta=FakeSta((1, 1, 1)))
    found = calls.errors(wrong, make, chosen)
    assert found["ThunderKittens"] > 0.3
    timed = calls.trusted(wrong, found)
    assert timed.sage2 is wrong.sage2 and timed.sta is None
    assert "its error against float64 is" in dict(timed.absent)["ThunderKittens"]


def test_a_peer_that_fails_does_not_end_the_others() -> None:
    class Failing(FakeSparge):
        def over_map(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
            raise RuntimeError("no kernel image")

    def make(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(1, sizes[0], sizes[2], 128)
        return q, q, q

    built = calls.Packages(sparge=Failing(None))
    found = calls.errors(built, make, torch.ones(2, 32, 16, dtype=torch.bool))
    assert found["SpargeAttn"] != found["SpargeAttn"]  # NaN
    assert calls.trusted(built, found).sparge is None


def test_a_mask_of_flex_attention_is_of_its_own_blocks() -> None:
    """Also where a tensor with other blocks lies at the same address."""
    kinds = torch.full((1, 4, 4), FULL, dtype=torch.int8)
    masks = []
    for kept in (4, 1):
        kinds[..., kept:] = 0
        masks.append(exact_peers._block_mask(kinds, 512, 512, False))
    assert [int(mask.full_kv_num_blocks.sum()) for mask in masks] == [16, 4]


def test_a_peer_with_other_results_is_not_timed() -> None:
    ours = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    assert bench_sparse_attention.agrees("same", lambda: 1.001 * ours, ours)
    assert not bench_sparse_attention.agrees("half", lambda: 0.5 * ours, ours)
    assert not bench_sparse_attention.agrees("none", lambda: 1 / 0, ours)
