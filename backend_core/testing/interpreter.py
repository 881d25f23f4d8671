"""Triton's interpreter takes what Triton's compiler takes, and rounds as a GPU does."""

from __future__ import annotations

from typing import Any

import torch
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_ROUNDED = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def mend_the_interpreter() -> None:
    """Mend four faults of the interpreter, once in a process.

    - To bf16 it truncates, and to 8 bits it rounds half up and loses the carry into the exponent,
      where a GPU rounds to nearest even and keeps 8-bit values finite.
    - It multiplies the bits of bf16 matrices.
    - From 3.8 on it refuses a constant times a tensor as a function's argument: it keeps the
      product as a constant whose value is a tensor.
    - A comparison of scalars has boolean numbers and the operands' type. Against a block they
      become numbers of that type, which 3.9 refuses as a mask.
    """
    if hasattr(interpreter, "_kda_dsv4_accepts"):
        return
    interpreter._kda_dsv4_accepts = True
    to_tensor = TritonSemantic.to_tensor
    create_splat = interpreter.InterpreterBuilder.create_splat

    def to_tensor_of_constants(self: Any, x: Any, check_type: bool = True) -> Any:
        if isinstance(x, core.constexpr) and isinstance(x.value, core.tensor):
            return x.value
        return to_tensor(self, x, check_type)

    def create_splat_of_booleans(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype == bool:
            arg = interpreter.TensorHandle(arg.data, core.int1)
        return create_splat(self, ret_ty, arg)

    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, to: Any, rounding: Any) -> Any:
        if source.primitive_bitwidth <= to.primitive_bitwidth or to.name not in _ROUNDED:
            return convert(data, source, to, rounding)
        value, dtype = _as_torch(data, source), _ROUNDED[to.name]
        if dtype.itemsize == 1:
            limit = torch.finfo(dtype).max
            value = value.clamp(-limit, limit)
        carrier, bits = {1: (torch.uint8, "uint8"), 2: (torch.int16, "uint16")}[dtype.itemsize]
        return value.to(dtype).view(carrier).numpy().view(bits)

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar.name == "bf16":
            a, b = (
                interpreter.TensorHandle(
                    _as_torch(x.data, x.dtype.scalar).float().numpy(), core.float32
                )
                for x in (a, b)
            )
        return create_dot(self, a, b, *others)

    interpreter.InterpreterBuilder.create_dot = create_dot_of_numbers
    interpreter._convert_float = convert_float
    TritonSemantic.to_tensor = to_tensor_of_constants
    interpreter.InterpreterBuilder.create_splat = create_splat_of_booleans


def _as_torch(data: Any, source: Any) -> torch.Tensor:
    """The numbers of a NumPy array of the interpreter, which holds bf16 as 16 bits."""
    if source.name == "bf16":
        return torch.from_numpy(data.copy().view("int16")).view(torch.bfloat16)
    return torch.from_numpy(data.copy())
