"""Operands: which registers or constant they name, and how a wave reads them as a type.

A type is a letter: ``u`` and ``i`` for 32-bit integers, ``s`` for an unsigned integer in the low
half, ``f`` for fp32, ``d`` for fp32 widened to fp64, ``h`` for fp16 in the low half, ``w`` for fp16
widened to fp64, ``q`` and ``p`` for unsigned and signed 64 bits in two registers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.amdgcn.errors import UnmodelledError

if TYPE_CHECKING:
    from tools.amdgcn.wave import Wave

VCC, M0, EXEC = 106, 124, 126
_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1),
}  # fmt: skip
ACC = 256
"""The row of the first AccVGPR; the 256 before it are the VGPRs."""
SCALAR = 512
"""Number of the first scalar register where both kinds share one numbering."""
_FLOAT = re.compile(r"-?\d+\.\d+")
Reader = Callable[["Wave"], Any]


@dataclass(frozen=True)
class Operand:
    """``kind``: ``"v"``, ``"s"``, ``"literal"`` or ``"off"``; ``bits`` of a literal are 64."""

    kind: str
    index: int = 0
    count: int = 1
    bits: int = 0
    negate: bool = False
    absolute: bool = False

    @property
    def registers(self) -> range:
        """In the numbering that both kinds share."""
        first = self.index + (SCALAR if self.kind == "s" else 0)
        return range(first, first + self.count) if self.kind in "vs" else range(0)


def operand(text: str) -> Operand:
    bare = text
    negate = bare.startswith("-") and not bare[1:2].isdigit()
    bare = bare[1:] if negate else bare
    absolute = bare.startswith("|")
    bare = bare.strip("|")
    if bare in _NAMED:
        return Operand("s", *_NAMED[bare], 0, negate, absolute)
    if found := re.fullmatch(r"([vas])(?:(\d+)|\[(\d+):(\d+)\])", bare):
        kind, one, first, last = found.groups()
        start = int(one or first)
        count = 1 if one else int(last) - start + 1
        if kind == "a":
            start += ACC
        return Operand("s" if kind == "s" else "v", start, count, 0, negate, absolute)
    if bare == "off":
        return Operand("off")
    if _FLOAT.fullmatch(bare):
        bits = struct.unpack("<I", struct.pack("<f", float(bare)))[0]
        return Operand("literal", bits=bits, negate=negate, absolute=absolute)
    try:
        return Operand("literal", bits=int(bare, 0) % 2**64, negate=negate, absolute=absolute)
    except ValueError:
        raise UnmodelledError(f"operand {text}") from None


_DTYPES = {"u": np.uint32, "i": np.int32, "f": np.float32}


def convert(bits: Any, kind: str) -> Any:
    """32-bit patterns, an array or one, as values of a type."""
    if kind == "u":
        return bits
    if kind == "s":
        return bits & np.uint32(0xFFFF)
    if kind in "if":
        return bits.view(_DTYPES[kind])
    if kind == "d":
        return bits.view(np.float32).astype(np.float64)
    if kind == "h":
        return bits.astype(np.uint16).view(np.float16)
    if kind == "w":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    raise UnmodelledError(f"type {kind} of a 32-bit operand")


def reader(source: Operand, kind: str) -> Reader:
    """How a wave reads a source: an array of 64 lanes, or one value for all of them."""
    if kind in "qp":
        return _reader64(source, kind)
    plain = _plain_reader(source, kind)
    if not (source.negate or source.absolute):
        return plain
    if kind not in "fdhw":
        raise UnmodelledError("a sign modifier on an integer")
    if not source.absolute:
        return lambda wave: -plain(wave)
    if not source.negate:
        return lambda wave: abs(plain(wave))
    return lambda wave: -abs(plain(wave))


def _plain_reader(source: Operand, kind: str) -> Reader:
    index = source.index
    if source.kind == "literal":
        if kind in "hw" and source.bits >> 16:
            raise UnmodelledError("a 32-bit literal as fp16")
        constant = convert(np.uint32(source.bits % 2**32), kind)
        return lambda wave: constant
    if source.kind == "s":
        return lambda wave: convert(np.uint32(wave.s[index]), kind)
    if source.kind != "v":
        raise UnmodelledError(f"a {source.kind} operand as a value")
    if kind == "u":
        return lambda wave: wave.u[index]
    if kind == "f":
        return lambda wave: wave.f[index]
    if kind == "i":
        return lambda wave: wave.i[index]
    if kind == "d":
        return lambda wave: wave.f[index].astype(np.float64)
    return lambda wave: convert(wave.u[index], kind)


def _reader64(source: Operand, kind: str) -> Reader:
    if source.negate or source.absolute:
        raise UnmodelledError("a sign modifier on 64 bits")
    dtype = np.uint64 if kind == "q" else np.int64
    index = source.index
    if source.kind == "literal":
        constant = np.uint64(source.bits).astype(dtype)
        return lambda wave: constant
    if source.kind == "s":
        return lambda wave: np.uint64(wave.s64(index)).astype(dtype)
    shift = np.uint64(32)
    return lambda wave: (
        wave.u[index].astype(np.uint64) | wave.u[index + 1].astype(np.uint64) << shift
    ).view(dtype)
