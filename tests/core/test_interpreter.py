"""The interpreter without its repeated work does what Triton's own does; and it takes what the
compiler takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter import spare_repeated_work

pytestmark = pytest.mark.interpreter
of_triton_3_6 = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."),
    reason="the interpreter of Triton 3.6 is what is changed",
)


@triton.jit
def first_of(a, b):
    """Not commutative: which number comes first shows."""
    return 2 * a - b


@triton.jit
def add_and_keep(a, b, c, x, y, z):
    return a + x, first_of(b, y), tl.maximum(c, z)


@triton.jit
def everything_kernel(x_ptr, n_ptr, out_ptr):
    rows = tl.arange(0, 4)
    at = rows[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + at)
    n = tl.load(n_ptr + at)
    a, b, c = tl.reduce((x, x, x), 1, add_and_keep)
    line = tl.sum(tl.where(rows[:, None] == 1, x, 0.0), 0)
    kept = tl.reduce(x, 0, first_of, keep_dims=True)
    tl.store(out_ptr + rows, a)
    tl.store(out_ptr + 4 + rows, b)
    tl.store(out_ptr + 8 + rows, c)
    tl.store(out_ptr + 12 + rows, tl.xor_sum(n, 1).to(tl.float32))
    tl.store(out_ptr + 16 + tl.arange(0, 8), line)
    tl.store(out_ptr + 24 + tl.arange(0, 8), tl.reshape(kept, (8,)))
    tl.store(out_ptr + 32, tl.reduce(x, None, first_of))
    tl.store(out_ptr + 33, tl.xor_sum(n).to(tl.float32))


def run() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 4, (4, 8), generator=generator).float()
    n = torch.randint(1, 1000, (4, 8), generator=generator, dtype=torch.int32)
    out = torch.zeros(34)
    everything_kernel[(1,)](x, n, out)
    return out


@of_triton_3_6
def test_upstreams_own_gives_the_same_bits() -> None:
    """In a process in which nothing is changed."""
    script = "from tests.core.test_interpreter import run; print(run().tolist())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ, TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    spare_repeated_work()
    assert done.stdout.strip() == str(run().tolist())


@triton.jit
def added_kernel(out_ptr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    o_n = tl.arange(0, LEFT)
    tl.store(out_ptr + o_n, o_n + tl.reshape(o_n[:, None] + tl.arange(0, RIGHT), (LEFT * RIGHT,)))


def test_blocks_of_other_sizes_are_refused() -> None:
    """A size of 1 and a missing axis are filled up."""
    spare_repeated_work()
    out = torch.zeros(8, dtype=torch.int32)
    added_kernel[(1,)](out, 8, 1)
    assert out.tolist() == [2 * n for n in range(8)]
    with pytest.raises(Exception, match="incompatible dimensions at index 0"):
        added_kernel[(1,)](out, 8, 4)


@of_triton_3_6
def test_a_launch_leaves_the_language_as_it_was() -> None:
    spare_repeated_work()
    before = tl.load, tl.sum, tl.tensor.__add__
    run()
    assert (tl.load, tl.sum, tl.tensor.__add__) == before
    run()  # its device functions find the language replaced again


FACTOR = tl.constexpr(2.0)


@triton.jit
def halved(x):
    return tl.abs(x) * 0.5


@triton.jit
def masked_by_a_number_kernel(x_ptr, n_ptr, out_ptr):
    at = tl.arange(0, 8)
    reads = tl.load(n_ptr) >= 0
    x = tl.load(x_ptr + at, mask=(at < 5) & reads, other=0.0)
    tl.store(out_ptr + at, halved(FACTOR * x))


def test_what_the_compiler_takes_is_interpreted() -> None:
    """A scalar as part of a mask, and a constant times a tensor as a function's argument."""
    x, out = torch.arange(1.0, 9.0), torch.full((8,), torch.nan)
    masked_by_a_number_kernel[(1,)](x, torch.zeros(1, dtype=torch.int64), out)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]


def test_a_scalar_comparison_stays_boolean_against_a_block() -> None:
    """The 64-bit numbers that it would become are refused as a mask by Triton 3.9."""
    builder = interpreter.InterpreterBuilder()
    number = interpreter.TensorHandle(np.array([3]), tl.int64)
    compared = builder.create_icmpSGE(number, number)
    splat = builder.create_splat(tl.block_type(tl.int1, [4]), compared)
    assert splat.data.dtype == bool and splat.data.shape == (4,)


@triton.jit
def rounded_kernel(x_ptr, out_ptr, TO: tl.constexpr, N: tl.constexpr):
    o_n = tl.arange(0, N)
    tl.store(out_ptr + o_n, tl.load(x_ptr + o_n).to(TO).to(tl.float32))


@pytest.mark.parametrize(
    ("to", "dtype"),
    [
        (tl.bfloat16, torch.bfloat16),
        (tl.float8e4nv, torch.float8_e4m3fn),
        (tl.float8e5, torch.float8_e5m2),
    ],
)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_rounded_as_on_a_gpu(
    to: object, dtype: torch.dtype, source: torch.dtype
) -> None:
    """To nearest even, with the carry into the exponent; 8-bit values stay finite."""
    steps = torch.arange(-2048, 2048) / 128  # ties of e4m3, and the numbers around powers of two
    x = torch.cat([steps, steps * 17.3, 6e4 * torch.tensor([1.0, -1.0, 1e-9, 0.0])]).to(source)
    x = torch.nn.functional.pad(x, (0, 16384 - len(x)))
    out = torch.empty(len(x))
    rounded_kernel[(1,)](x, out, to, len(x))
    limit = torch.finfo(dtype).max
    assert torch.equal(out, x.float().clamp(-limit, limit).to(dtype).float())
