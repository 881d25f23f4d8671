"""The peers of block-sparse attention that are built from sources: building, loading, errors."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.peers import sparse_attention_built as built
from benchmarks.peers import sparse_attention_built_calls as calls
from softmax_backend.block_sparse import block_sparse_attention
from softmax_backend.plan import bsr, intervals
from softmax_backend.plan.sliding_tile import sliding_tile
from softmax_backend.plan.token_order import tile_order

NVCC = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *bad.cu*) echo "bad.cu(3): error: no such thing" >&2; exit 2;; esac
case "$*" in *slow.cu*) exec sleep 30;; esac
while [ "$1" != "-o" ]; do shift; done
echo made > "$2"
"""
PEER = built.Peer(
    "toy", (built.Library("_a", ("csrc/a.cu",)), built.Library("_b", ("csrc/b.cu",), ("c.cu", "")))
)


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> built.Toolkit:
    """A compiler that notes its arguments and writes what it is asked for."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC.format(log=tmp_path / "log"))
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(built.PEERS, "Toy", PEER)
    return built.Toolkit(nvcc, ("/torch/include",), ("/torch/lib",))


def sources(folder: Path, *names: str) -> Path:
    for name in ("csrc/a.cu", "csrc/b.cu", "toy/core.py", *names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_a_peer_is_built_once(tmp_path: Path, toolkit: built.Toolkit) -> None:
    folder = sources(tmp_path / "toy")
    found = built.build({"Toy": folder}, tmp_path / "cache", 20.0, toolkit)["Toy"]
    assert isinstance(found, Path)
    assert {x.name for x in (found / "toy").iterdir()} == {"core.py", "_a.so", "_b.so"}
    commands = (tmp_path / "log").read_text().splitlines()
    assert sum("-c" in line.split() for line in commands) == 3
    assert all("arch=compute_90a" in line for line in commands if " -c " in line)
    link = next(line for line in commands if "_b.unfinished" in line)
    assert "objects/_b/b.o" in link and "objects/_b/c.o" in link and "-ltorch_python" in link
    assert built.build({"Toy": folder}, tmp_path / "cache", 20.0, toolkit)["Toy"] == found
    assert (tmp_path / "log").read_text().splitlines() == commands
    (folder / "csrc/a.cu").write_text("// changed")
    assert built.build({"Toy": folder}, tmp_path / "cache", 20.0, toolkit)["Toy"] != found


@pytest.mark.parametrize(
    ("source", "seconds", "message"),
    [
        ("csrc/bad.cu", 20.0, "bad.o was not made: bad.cu(3): error: no such thing"),
        ("csrc/slow.cu", 0.5, "slow.o took longer than the 0 s left"),
        ("csrc/gone.cu", 20.0, "lack csrc/gone.cu"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(
    tmp_path: Path,
    toolkit: built.Toolkit,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    seconds: float,
    message: str,
) -> None:
    monkeypatch.setitem(built.PEERS, "Toy", built.Peer("toy", (built.Library("_a", (source,)),)))
    folder = sources(tmp_path / "toy", *([source] if "gone" not in source else []))
    found = built.build({"Toy": folder}, tmp_path / "cache", seconds, toolkit)["Toy"]
    assert isinstance(found, str) and message in found and "\n" not in found
    assert calls.load({"SpargeAttn": found}) == calls.Built(absent=(("SpargeAttn", found),))


def test_a_library_that_does_not_load_is_said(tmp_path: Path) -> None:
    found = calls.load({"ThunderKittens": tmp_path})
    assert found.sta is None
    assert found.absent[0][1].startswith("was built, but does not load: No module named")


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
        block_map = kept[0].float()
        rows, cols = (torch.full((2, n), size) for n, size in ((32, 64), (16, 128)))
        plan = bsr.from_block_map(block_map > 0, rows, cols, 2, block_m=64, block_n=128)
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
    found = calls.errors(calls.Built(FakeSage(None), FakeSparge(None), FakeSta(None)), make, chosen)
    right = {"SageAttention2", "SageAttention2 causal", "SageAttention2, kernel alone",
             "SpargeAttn", "ThunderKittens"}  # fmt: skip
    assert {name for name, error in found.items() if error < 1e-5} == right
    assert found["SageAttention2, kernel alone causal"] > 0.3
    assert found["SpargeAttn causal, every block"] > 0.3
    assert found["SpargeAttn, kernel alone"] != found["SpargeAttn, kernel alone"]  # NaN
    wrong = calls.Built(sage2=FakeSage(None), sta=FakeSta((1, 1, 1)))
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

    built = calls.Built(sparge=Failing(None))
    found = calls.errors(built, make, torch.ones(2, 32, 16, dtype=torch.bool))
    assert found["SpargeAttn"] != found["SpargeAttn"]  # NaN
    assert calls.trusted(built, found).sparge is None
