"""The only parameter of a CUDA kernel: a struct's C declaration, and what packs its bytes."""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Callable, Mapping, Sequence

_FORMATS = {"int": "i", "float": "f", "i64": "q", "u64": "Q"}

Fields = Sequence[tuple[str, str]]
"""(name, C type) in order: a pointer, int, float, i64, u64, or the name of a struct of such."""


class CudaParams:
    """A kernel's only parameter, ``struct Params``: the C declaration and what packs it, from one
    list of fields.

    Attributes:
        names: of the fields, in order; addresses: of those that ``at`` fills in.
        header: the text of ``params.cuh``, which the kernel's sources include.
        size: of the struct, in bytes.
        pack: takes every field by name and returns the struct's bytes: a pointer as its address, a
            field that is a struct as the tuple of its members, without those that ``at`` fills in.
            A missing or unknown name is a TypeError, a tuple of another length a ValueError, a
            value that does not fit a ``struct.error``.
    """

    def __init__(
        self,
        fields: Fields,
        structs: Mapping[str, Fields] | None = None,
        addresses: Sequence[str] = (),
        alignment: int = 8,
    ) -> None:
        """Args:
        fields: of the struct.
        structs: by name, the types of fields that are structs themselves, such as a pointer
            with its strides. All members of one have 8 bytes.
        addresses: fields that ``at`` fills in, in their order: a pointer, the pointers that a
            struct begins with, or the bytes of a struct that has none, such as a tensor map.
        alignment: of the struct, in bytes.
        """
        structs = structs or {}
        self.names = tuple(name for name, _ in fields)
        self.addresses = tuple(name for name in self.names if name in addresses)
        declarations = (_declaration(kind, of) for kind, of in structs.items())
        self.header = "\n".join(("#pragma once", *declarations, _declaration("Params", fields)))
        cut, join, begin, formats, filled = "=", "=", 0, "@", dict[str, int]()
        for name, kind in fields:
            of = structs.get(kind, ((name, kind),))
            end = struct.calcsize(f"{formats}0{_format(of[0])}")
            formats += "".join(map(_format, of))
            if name not in addresses:
                continue
            pointers = itertools.takewhile(lambda field: field[1].endswith("*"), of)
            filled[name] = len(tuple(pointers)) or len(of)
            for what in ["Q"] * filled[name] if of[0][1].endswith("*") else [f"{8 * len(of)}s"]:
                size = struct.calcsize(what)
                cut += f"{end - begin}s{size}x"
                join += f"{end - begin}s{what}"
                begin = end = end + size
        size = struct.calcsize(f"{formats}0Q")  # aligned and padded as C does
        packer = struct.Struct(f"{formats}0Q{-size % alignment}x")
        self.size = packer.size
        self._cut, self._join = (struct.Struct(f"{x}{self.size - begin}s") for x in (cut, join))
        self._strided = [
            name
            for name, kind in fields
            if filled.get(name, sys.maxsize) < len(structs.get(kind, ""))
        ]
        scope: dict[str, Callable[..., bytes]] = {"pack": packer.pack}
        exec(_packing_function(fields, structs, filled), scope)
        self.pack = scope["by_name"]

    def at(self, strides: Mapping[str, tuple[int, ...]], **fields: float) -> Callable[..., bytes]:
        """``pack`` for launches that differ in addresses alone.

        Args:
            strides: the other members of structs that begin with addresses; those of other fields
                are passed over.
            fields: all others.

        Returns:
            A function of all that is filled in, in the order of the fields.
        """
        packed = self.pack(**fields, **{name: strides[name] for name in self._strided})
        pieces, join = self._cut.unpack(packed), self._join.pack
        parts: list[bytes | int] = [0] * (2 * len(pieces) - 1)
        parts[::2] = pieces

        def fill(*addresses: int) -> bytes:
            whole = parts.copy()
            whole[1::2] = addresses
            return join(*whole)

        return fill


def _packing_function(
    fields: Fields, structs: Mapping[str, Fields], filled: Mapping[str, int]
) -> str:
    """The source of ``by_name``, which takes every field and passes their members on in order, but
    for the first so many of ``filled``, which are zeros.

    It may run in every launch, hence this form: parameters are not keyword-only and nothing is
    starred, each of which CPython 3.11 takes longer for.
    """
    taken, lines, values = [], [], []
    for name, kind in fields:
        members = [f"{name}_{i}" for i in range(len(structs.get(kind, "")))] or [name]
        zeros = filled.get(name, 0)
        values += ["0"] * zeros + members[zeros:]
        if zeros < len(members):
            taken.append(name)
            if kind in structs:
                lines.append(f"    {', '.join(members[zeros:])}, = {name}")
    head = f"def by_name({', '.join(taken)}):"
    return "\n".join((head, *lines, f"    return pack({', '.join(values)})"))


def _format(field: tuple[str, str]) -> str:
    name, kind = field
    if kind.endswith("*"):
        return "Q"
    if kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ValueError(f"field {name}: expected a pointer, {known} or a struct, got {kind}")
    return _FORMATS[kind]


def _declaration(name: str, fields: Fields) -> str:
    lines = "".join(f"    {kind} {field};\n" for field, kind in fields)
    return f"struct {name} {{\n{lines}}};\n"
