"""What of the run-time compiler works without a GPU: its cache, and how it says what is missing."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from backend_core.launch import cuda as cuda_source
from backend_core.launch.cuda import CudaLaunch
from backend_core.launch.cuda_params import CudaParams
from tests.cuda_offline import NVCC, compile_cubin


class FakeNvrtc:
    """Answers nvrtcVersion alone."""

    def __init__(self, version: tuple[int, int]) -> None:
        self.version = version

    def nvrtcVersion(self, major: object, minor: object) -> None:  # noqa: N802
        ctypes.cast(major, ctypes.POINTER(ctypes.c_int))[0] = self.version[0]
        ctypes.cast(minor, ctypes.POINTER(ctypes.c_int))[0] = self.version[1]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The options of each compilation that the cache could not spare."""
    seen: list[tuple[str, ...]] = []

    def compile_once(
        library: object, text: bytes, name: str, params: str, options: tuple[str, ...]
    ) -> bytes:
        assert all(option.startswith("--include-path=") for option in options[-2:])
        seen.append(options[:-2])
        return text + params.encode() + repr(options).encode()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_source, "_compile", compile_once)
    monkeypatch.setattr(cuda_source, "_nvrtc", lambda: FakeNvrtc((13, 0)))
    return seen


def test_source_headers_params_options_and_compiler_each_make_a_new_variant(
    compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(cuda_source, "HEADERS", shared)
    source = tmp_path / "k.cu"
    source.write_text("a")

    def compile_now(params: str = "", option: str = "-DX=1") -> None:
        before = len(compiled)
        for _ in range(2):
            cuda_source._compiled(source, params, (option,))
        assert len(compiled) == before + 1

    compile_now()
    compile_now(option="-DX=2")
    compile_now(params="struct Params {};")
    source.write_text("b")
    compile_now()
    (tmp_path / "h.cuh").write_text("c")
    compile_now()
    (shared / "h.cuh").write_text("d")
    compile_now()
    monkeypatch.setattr(cuda_source, "_nvrtc", lambda: FakeNvrtc((13, 1)))
    compile_now()


@pytest.mark.parametrize(
    ("cuda", "brought", "chosen"),
    [
        ("12.8", ("12",), "torch's libnvrtc.so.12"),
        ("12.8", ("12", "13"), "torch's libnvrtc.so.12"),
        ("13.0", ("12", "13"), "torch's libnvrtc.so.13"),
        ("12.8", (), "libnvrtc.so.12"),
        ("13.0", (), "libnvrtc.so.13"),
    ],
)
def test_the_compiler_that_torch_brought_goes_before_the_systems(
    cuda: str, brought: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one compiles what an older driver does not load."""

    def installed(library: str) -> list[str]:
        return [f"torch's {library}"] if library.rpartition(".")[2] in brought else []

    monkeypatch.setattr(cuda_source, "_installed", installed)
    monkeypatch.setattr(cuda_source, "_open", lambda library: library)
    monkeypatch.setattr(cuda_source.torch.version, "cuda", cuda)
    assert cuda_source._nvrtc.__wrapped__() == chosen


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "_LIBRARIES", ("libnvrtc.so.0",))
    cuda_source._nvrtc.cache_clear()
    with pytest.raises(ImportError, match=r"none of libnvrtc\.so\.0 is installed beside torch"):
        cuda_source._nvrtc()
    cuda_source._nvrtc.cache_clear()


MIXED = CudaParams(
    (
        ("a", "int"),
        ("b", "const u16*"),
        ("rows", "Rows"),
        ("c", "float"),
        ("d", "i64"),
        ("e", "int"),
    ),
    {"Rows": (("ptr", "void*"), ("stride", "i64"))},
)


def test_params_are_packed_by_name_as_c_lays_them_out() -> None:
    packed = MIXED.pack(e=7, b=1 << 40, rows=(2, -3), a=-1, d=-6, c=0.5)
    assert packed == struct.pack("<i4xQQqf4xqi4x", -1, 1 << 40, 2, -3, 0.5, -6, 7)
    assert len(packed) == MIXED.size


def test_a_launch_takes_its_addresses_by_name() -> None:
    """A struct without pointers is filled in as its bytes, and an aligned parameter is padded."""

    class Addresses(NamedTuple):
        out: int
        other: int
        map: bytes

    params = CudaParams(
        (("n", "int"), ("map", "Map"), ("out", "float*"), ("m", "int")),
        {"Map": (("low", "u64"), ("high", "u64"))},
        ("out", "map"),
        alignment=64,
    )
    launched: list[Any] = []
    kernel: Any = lambda *args, **options: launched.append((args, options))  # noqa: E731
    launch = CudaLaunch(kernel, 3, 128, params, pdl=True, n=7, m=-1)
    for address in (1, 2):
        launch(Addresses(out=address, other=5, map=struct.pack("QQ", 8, 9)))
    bytes_of = [struct.pack("@iQQQi28x", 7, 8, 9, address, -1) for address in (1, 2)]
    assert params.size == 64
    assert launched == [((3, 128, packed), {"pdl": True}) for packed in bytes_of]
    with pytest.raises(AttributeError, match="map"):
        launch(namedtuple("Other", ("out",))(1))  # type: ignore[arg-type]


def test_params_differ_in_addresses_alone() -> None:
    structs = {
        "Rows": (("ptr", "void*"), ("stride", "i64")),
        "Two": (("x", "void*"), ("y", "const void*"), ("stride", "i64"), ("of_all", "void*")),
    }
    fields = (
        *(("a", "int"), ("b", "u16*"), ("c", "float"), ("rows", "Rows"), ("fixed", "u16*")),
        *(("two", "Two"), ("d", "int")),
    )
    whole, params = CudaParams(fields, structs), CudaParams(fields, structs, ("two", "rows", "b"))
    plain = {"a": 1, "c": 0.5, "fixed": 1 << 40, "d": -4}
    fill = params.at({"rows": (8,), "two": (9, 10), "another's": (11,)}, **plain)
    for b, row, x, y in ((1 << 41, 2, 3, 1 << 63), (5, 6, 7, 8)):
        want = whole.pack(b=b, rows=(row, 8), two=(x, y, 9, 10), **plain)
        assert fill(b, row, x, y) == want
    with pytest.raises(ValueError, match="size"):
        fill(1, 2, 3)
    with pytest.raises(TypeError, match="missing"):
        params.at({"rows": (8,), "two": (9, 10)}, a=1)
    with pytest.raises(KeyError, match="two"):
        params.at({"rows": (8,)}, **plain)


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": 0, "b": 0, "rows": (0, 0), "c": 0.0, "d": 0},
        {"a": 0, "b": 0, "rows": (0, 0), "c": 0.0, "d": 0, "e": 0, "f": 0},
        {"a": 0, "b": 0, "rows": (0, 0), "c": "x", "d": 0, "e": 0},
        {"a": 0, "b": 0, "rows": (0,), "c": 0.0, "d": 0, "e": 0},
        {"a": 0, "b": 0, "rows": (0, 0, 0), "c": 0.0, "d": 0, "e": 0},
    ],
    ids=["missing", "unknown", "not a number", "a member is missing", "a member too many"],
)
def test_wrong_params_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError, struct.error)):
        MIXED.pack(**wrong)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_compiler_lays_params_out_alike_and_says_the_shared_memory(tmp_path: Path) -> None:
    fields = {"a": 0, "b": 8, "rows": 16, "c": 32, "d": 40, "e": 48}
    source = tmp_path / "k.cu"
    source.write_text(
        '#include "hopper.cuh"\n#include "params.cuh"\n#include <cstddef>\n'
        + "".join(f"static_assert(offsetof(Params, {x}) == {at});\n" for x, at in fields.items())
        + f"static_assert(sizeof(Params) == {MIXED.size});\n"
        + "struct Shared { float x[FLOATS]; };\n"
        + "template __global__ void shared_bytes<sizeof(Shared)>();\n"
        + 'extern "C" __global__ void k(const Params p) {}\n'
    )
    for count in (3, 300):
        _, kernel = compile_cubin(source, MIXED, {"FLOATS": count})
        assert kernel["shared_bytes"] == 4 * count


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_a_kernel_that_does_not_say_its_shared_memory_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k() {}\n')
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-o", "k.cubin", "k.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    image = (tmp_path / "k.cubin").read_bytes()
    with pytest.raises(RuntimeError, match="the compiled kernel has no instance of shared_bytes"):
        cuda_source.shared_bytes_of(image)
