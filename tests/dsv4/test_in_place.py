"""The in-place operator against float64: the seed's operation without its round trips."""

from __future__ import annotations

import pytest
import torch

from dsv4_backend import SeqLens, compress_norm_rope_hadamard_
from dsv4_backend.compressor.in_place import in_torch
from tests.dsv4.cases import DEVICE, TARGET, rope_table

EPS = 1e-6
TABLE = rope_table(generator=torch.Generator().manual_seed(1))


def make_rows(rows: int, head_dim: int, dtype: torch.dtype, stride: int | None = None):
    g = torch.Generator().manual_seed(rows)
    buffer = torch.randn(rows, stride or head_dim, generator=g).to(dtype).to(DEVICE)
    weight = (0.5 + torch.rand(head_dim, generator=g)).to(dtype).to(DEVICE)
    return buffer[:, :head_dim], weight


def compress(kv, weight, table, plan, ratio, rotate):
    options = {"head_dim": kv.shape[1], "compress_ratio": ratio, "rotate": rotate}
    compress_norm_rope_hadamard_(kv, weight, EPS, table, plan, **options, target=TARGET)


def run_both(kv, weight, plan, ratio, rotate):
    want = kv.clone()
    in_torch(want, weight, EPS, TABLE, plan.seq_lens, compress_ratio=ratio, rotate=rotate)
    compress(kv, weight, TABLE, plan, ratio, rotate)
    return want


def assert_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    else:  # one bf16 ulp
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-6)
        assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_decode(head_dim: int, ratio: int, rotate: bool, dtype: torch.dtype) -> None:
    seq_lens = torch.tensor([ratio, ratio + 1, 7 * ratio, -1, 0, ratio - 1], device=DEVICE)
    kv, weight = make_rows(6, head_dim, dtype, stride=head_dim + 64)
    before = kv.clone()
    want = run_both(kv, weight, SeqLens(seq_lens.int()), ratio, rotate)
    assert_rows(kv, want)
    assert torch.equal(kv[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
    assert not torch.equal(kv[[0, 2]], before[[0, 2]])


def test_rows_after_the_plans_are_left_alone() -> None:
    kv, weight = make_rows(9, 512, torch.float32)
    kv[3:] = 10000.0  # what sglang leaves in rows without a plan entry
    before = kv.clone()
    want = run_both(kv, weight, SeqLens(torch.tensor([8, 12, 400], device=DEVICE)), 4, False)
    assert_rows(kv, want)
    assert torch.equal(kv[3:], before[3:])


def test_no_rows() -> None:
    kv, weight = make_rows(1, 128, torch.float32)
    before = kv.clone()
    run_both(kv, weight, SeqLens(torch.empty(0, dtype=torch.int64, device=DEVICE)), 4, True)
    assert torch.equal(kv, before)


def test_complex_table_is_the_interleaved_one() -> None:
    kv, weight = make_rows(1, 128, torch.float32)
    other = kv.clone()
    plan = SeqLens(torch.tensor([40], device=DEVICE))
    run_both(kv, weight, plan, 4, True)
    compress(other, weight, torch.view_as_complex(TABLE.view(-1, 32, 2)), plan, 4, True)
    assert torch.equal(kv, other)


def test_rotation_is_orthogonal_and_natural_ordered() -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < 128:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    kv, weight = make_rows(2, 128, torch.float32)
    plain = kv.clone()
    plan = SeqLens(torch.tensor([4, 8], device=DEVICE))
    run_both(kv, weight, plan, 4, True)
    run_both(plain, weight, plan, 4, False)
    want = plain.double().cpu() @ matrix * 128**-0.5
    torch.testing.assert_close(kv.double().cpu(), want, rtol=0, atol=2e-6)
