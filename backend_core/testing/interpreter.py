"""Triton's interpreter takes from a kernel what Triton's compiler takes."""

from __future__ import annotations

from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def accept_what_compiles() -> None:
    """Mend two faults of the interpreter in newer releases than 3.6, once in a process.

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

    TritonSemantic.to_tensor = to_tensor_of_constants
    interpreter.InterpreterBuilder.create_splat = create_splat_of_booleans
