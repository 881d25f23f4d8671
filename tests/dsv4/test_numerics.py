"""The kernels' integer arithmetic against torch's conversions, over whole code ranges."""

from __future__ import annotations

import pytest
import torch

from dsv4_backend import reference
from tests.dsv4.cases import DEVICE, make_spec

import triton  # isort: skip
import triton.language as tl  # isort: skip

from backend_core.kernels.codecs import (  # isort: skip
    ceil_log2_ratio,
    encode_e2m1,
    encode_e4m3,
    exp2_int,
    round_bf16,
)
from backend_core.kernels.rope_hadamard import hadamard  # isort: skip


@triton.jit
def encode_kernel(x_ptr, y_ptr, KIND: tl.constexpr, FLAG: tl.constexpr, N: tl.constexpr):
    o_n = tl.arange(0, N)
    b_x = tl.load(x_ptr + o_n)
    if KIND == "e4m3":
        b_y = encode_e4m3(b_x, FLAG)
    elif KIND == "e2m1":
        b_y = encode_e2m1(b_x, FLAG)
    elif KIND == "bf16":
        b_y = round_bf16(b_x)
    elif KIND == "hadamard":
        b_y = hadamard(b_x, N)
    elif FLAG:
        b_y = exp2_int(ceil_log2_ratio(b_x, 0x400000, 2))
    else:
        b_y = exp2_int(ceil_log2_ratio(b_x, 0x600000, 8))
    tl.store(y_ptr + o_n, b_y)


def encode(x: torch.Tensor, kind: str, flag: bool, dtype: torch.dtype) -> torch.Tensor:
    size = triton.next_power_of_2(x.numel())
    padded = torch.ones(size, device=DEVICE)
    padded[: x.numel()] = x
    out = torch.empty(size, dtype=dtype, device=DEVICE)
    encode_kernel[(1,)](padded, out, KIND=kind, FLAG=flag, N=size)
    return out[: x.numel()]


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """The values, and what lies one fp32 ulp to either side."""
    up = torch.nextafter(x, torch.full_like(x, torch.inf))
    down = torch.nextafter(x, torch.full_like(x, -torch.inf))
    return torch.cat((x, up, down))


@pytest.mark.parametrize("fp8", ["ocp", "fnuz"])
def test_e4m3_at_every_code_and_midpoint(fp8: str) -> None:
    codes = torch.arange(128, dtype=torch.uint8, device=DEVICE)
    values = reference.decode_e4m3(codes, fp8)  # type: ignore[arg-type]
    values = values[torch.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    x = neighbours(torch.cat((values, middle)))
    x = x[x.abs() <= values.max()]
    x = torch.cat((x, -x, torch.tensor([1e-30, -1e-30, 0.0, -0.0], device=DEVICE)))
    got = encode(x, "e4m3", fp8 == "fnuz", torch.uint8)
    assert torch.equal(got, reference.encode_e4m3(x, fp8))  # type: ignore[arg-type]


def test_what_does_not_fit_e4m3_becomes_nan() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e4], device=DEVICE)
    assert encode(x, "e4m3", False, torch.uint8).tolist() == [0x7F, 0x7F, 0xFF, 0x7F]
    assert encode(x, "e4m3", True, torch.uint8).tolist() == [0x80] * 4


@pytest.mark.parametrize("ties_even", [False, True])
def test_e2m1_at_every_code_and_midpoint(ties_even: bool) -> None:
    values = reference.decode_e2m1(torch.arange(8, device=DEVICE))
    x = neighbours(torch.cat((values, (values[1:] + values[:-1]) / 2, values + 7)))
    x = torch.cat((x, -x))
    got = encode(x, "e2m1", ties_even, torch.uint8)
    assert torch.equal(got, reference.encode_e2m1(x, ties_even))


def test_e2m1_ties() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25], device=DEVICE)
    assert encode(ties, "e2m1", True, torch.uint8).tolist() == [0, 2, 2, 4, 4, 6, 6, 8]
    assert encode(ties, "e2m1", False, torch.uint8).tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_bf16_is_rounded_to_even() -> None:
    bits = torch.randint(0, 2**31 - 2**24, (4096,), dtype=torch.int32)
    bits[:256] = torch.arange(256, dtype=torch.int32) * 0x8000 + 0x3F800000  # ties
    x = bits.to(DEVICE).view(torch.float32)
    assert torch.equal(encode(x, "bf16", False, torch.float32), x.bfloat16().float())


@pytest.mark.parametrize("is_fp4, top", [(False, 448.0), (True, 6.0)])
def test_scales_are_the_smallest_powers_that_fit(is_fp4: bool, top: float) -> None:
    exact = top * torch.exp2(torch.arange(-60, 60, device=DEVICE).float())
    x = torch.cat((neighbours(exact), torch.rand(256, device=DEVICE) * 1000 + 1e-4))
    scale = encode(x, "scale", is_fp4, torch.float32).double()
    assert (x.double() <= top * scale).all()
    assert (x.double() > top * scale / 2).all()
    want = torch.exp2(reference.ceil_log2(x.double() / top).double())
    assert torch.equal(scale, want)


@pytest.mark.parametrize("size", [128, 512])
def test_hadamard_is_its_own_inverse(size: int) -> None:
    x = torch.randn(size, device=DEVICE)
    y = encode(x, "hadamard", False, torch.float32)
    torch.testing.assert_close(y.double(), reference.hadamard(x.double()), rtol=0, atol=2e-6)
    back = encode(y, "hadamard", False, torch.float32)
    torch.testing.assert_close(back, x, rtol=0, atol=4e-6)


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "indexer_fp8", "indexer_mxfp4"])
def test_quantise_and_back(cache_format: str) -> None:
    spec = make_spec(cache_format)
    x = torch.randn(5, spec.head_dim, dtype=torch.float64, device=DEVICE)
    data, scales = reference.quantise(x, spec)
    back = reference.dequantise(data, scales, spec)
    step = 0.26 if cache_format == "indexer_mxfp4" else 0.07
    torch.testing.assert_close(back.double(), x, rtol=step, atol=step)
