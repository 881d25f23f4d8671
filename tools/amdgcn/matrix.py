"""MFMA: which lane and register hold which element, and how the products are summed.

Layout (AMD matrix instruction calculator; instruction sets of CDNA3 and CDNA4, "MFMA"): of an M x N
x K product with n = K / (64 / M) elements a lane, lane l holds A[l % M, n (l / M) + e] and
B[n (l / N) + e, l % N] for e < n; register r of the result holds row
``8 (r / 4) + 4 (l / 32) + r % 4`` of column l % 32 for M = 32 and row ``4 (l / 16) + r`` of column
l % 16 for M = 16.

Sums (measured on CDNA3 by MMA-Sim, arXiv:2511.10909; taken to be the same on CDNA4): fp32 products
one after another, each fused with the sum so far. fp16 and bf16 products eight at a time: cut off
24 bits below the largest exponent, added, then added to the sum so far, both cut off downwards (31
and 24 bits below the larger exponent), and rounded to nearest. Denormals are kept. Integer sums
wrap around.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.amdgcn.errors import UnmodelledError
from tools.amdgcn.operands import Operand
from tools.amdgcn.wave import Wave

_GROUP = 8
_NONE = -10_000
"""Exponent of a zero."""
FORMS = {
    ("f32", 32, 8, "f16"), ("f32", 16, 16, "f16"), ("f32", 16, 4, "f32"), ("f32", 32, 2, "f32"),
    ("f32", 16, 32, "f16"), ("f32", 32, 16, "f16"),
    ("f32", 32, 8, "bf16"), ("f32", 16, 16, "bf16"), ("f32", 16, 32, "bf16"),
    ("f32", 32, 16, "bf16"), ("i32", 32, 16, "i8"), ("i32", 32, 32, "i8"),
}  # fmt: skip
"""Type of the sums, M = N, K, type of the products' operands."""
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
_LEAST_EXPONENT = {"f16": -14, "bf16": -126}


def build(name: str, operands: list[Operand]) -> Callable[[Wave], None]:
    found = re.fullmatch(r"v_mfma_(f32|i32)_(\d+)x(\d+)x(\d+)_(\w+)", name)
    if found is None:
        raise UnmodelledError(f"{name} is not modelled")
    rows, columns, depth = (int(x) for x in found.groups()[1:4])
    sums, dtype = found.group(1), found.group(5)
    if rows != columns or (sums, rows, depth, dtype) not in FORMS:
        raise UnmodelledError(f"{name} is not modelled")
    target, a, b, c = operands
    words = depth * rows // 64 * _BYTES[dtype] // 4
    row, column = result_layout(rows)
    if a.count != words or b.count != words or target.count != row.shape[0]:
        raise UnmodelledError(f"{name} with registers of other widths")
    least = _LEAST_EXPONENT.get(dtype, 0)

    def run(wave: Wave) -> None:
        registers = wave.f if sums == "f32" else wave.i
        left = _matrix(wave, a, rows, dtype)
        right = _matrix(wave, b, rows, dtype).T
        start = np.zeros((rows, rows), registers.dtype)
        if c.kind == "v":
            start[row, column] = registers[c.index : c.index + row.shape[0]]
        elif c.bits:
            raise UnmodelledError("MFMA onto a constant other than zero")
        if sums == "i32":  # fp64 holds these products and their sums without rounding
            result = (left @ right).astype(np.int32) + start
        elif dtype == "f32":
            result = _multiply_f32(left, right, start)
        else:
            result = _multiply_narrow(left, right, start, least)
        registers[target.index : target.index + row.shape[0]] = result[row, column]

    return run


def result_layout(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, ``[registers, 64]``, of the elements of a result."""
    lane = np.arange(64)[None]
    register = np.arange(size * size // 64)[:, None]
    per_block = 4 * (64 // size)
    row = per_block * (register // 4) + 4 * (lane // size) + register % 4
    return row, np.broadcast_to(lane % size, row.shape)


def _matrix(wave: Wave, source: Operand, size: int, dtype: str) -> np.ndarray:
    """``[size, K]`` fp64: each lane has adjacent elements of one row."""
    if source.kind != "v":
        raise UnmodelledError("MFMA of a constant")
    words = np.ascontiguousarray(wave.u[source.index : source.index + source.count].T)
    held: Any
    if dtype == "bf16":
        held = (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        held = words.view({"f32": np.float32, "f16": np.float16, "i8": np.int8}[dtype])
    blocks = held.reshape(64 // size, size, -1)  # [lane / size, row, element]
    return np.asarray(blocks.transpose(1, 0, 2).reshape(size, -1).astype(np.float64))


def _multiply_f32(a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    total = start
    for k in range(a.shape[1]):
        total = (a[:, k, None] * b[None, k] + total).astype(np.float32)
    return total


def _multiply_narrow(a: np.ndarray, b: np.ndarray, start: np.ndarray, least: int) -> np.ndarray:
    """``least``: the exponent of the operands' smallest normal number."""
    total = start
    exponent_a, exponent_b = _exponent(a, least), _exponent(b, least)
    for first in range(0, a.shape[1], _GROUP):
        part = slice(first, first + _GROUP)
        products = a[:, None, part] * b.T[None, :, part]
        exponents = exponent_a[:, None, part] + exponent_b.T[None, :, part]
        total = _add(products, exponents, total)
    return total


def _add(products: np.ndarray, exponents: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Products ``[M, N, 8]`` onto the sum so far, all fp64 but the result."""
    plain = products.sum(-1) + start
    largest = np.maximum(exponents.max(-1), -1000)
    unit = np.ldexp(1.0, largest - 24)
    partial = (np.trunc(products / unit[..., None]) * unit[..., None]).sum(-1)
    exponent_c = _exponent(start.astype(np.float64), -126)
    top = np.maximum(np.maximum(largest, exponent_c), -1000)
    fine, coarse = np.ldexp(1.0, top - 31), np.ldexp(1.0, top - 24)
    total = np.floor(partial / fine) * fine + np.floor(start / coarse) * coarse
    return np.where(np.isfinite(plain), total, plain).astype(np.float32)


def _exponent(x: np.ndarray, least: int) -> np.ndarray:
    """Exponent of values in [1, 2) times a power of two; denormals have that of the least."""
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
    return np.where(x == 0, _NONE, np.maximum(exponent - 1, least))
