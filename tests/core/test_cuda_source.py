"""What of the run-time compiler works without a GPU: its cache, and how it says what is missing."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from backend_core.launch import cuda as cuda_source


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

    def compile_once(library: object, text: bytes, name: str, options: tuple[str, ...]) -> bytes:
        assert options[-1].startswith("--include-path=")
        seen.append(options[:-1])
        return text + repr(options).encode()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_source, "_compile", compile_once)
    monkeypatch.setattr(cuda_source, "_nvrtc", lambda: FakeNvrtc((13, 0)))
    return seen


def test_a_variant_compiles_once(compiled: list[tuple[str, ...]], tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text("a")
    first = cuda_source._compiled(source, ("-DX=1",))
    assert cuda_source._compiled(source, ("-DX=1",)) == first
    assert compiled == [("-DX=1",)]


def test_source_header_options_and_compiler_each_make_a_new_variant(
    compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "k.cu"
    source.write_text("a")
    images = [cuda_source._compiled(source, ("-DX=1",)), cuda_source._compiled(source, ("-DX=2",))]
    source.write_text("b")
    images.append(cuda_source._compiled(source, ("-DX=2",)))
    (tmp_path / "h.cuh").write_text("c")
    cuda_source._compiled(source, ("-DX=2",))
    monkeypatch.setattr(cuda_source, "_nvrtc", lambda: FakeNvrtc((13, 1)))
    cuda_source._compiled(source, ("-DX=2",))
    assert len(set(images)) == 3 and len(compiled) == 5


def test_a_cache_that_cannot_be_written_is_done_without(
    compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    source = tmp_path / "k.cu"
    source.write_text("a")
    assert cuda_source._compiled(source, ()) == cuda_source._compiled(source, ())
    assert len(compiled) == 2


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "_LIBRARIES", ("libnvrtc.so.0",))
    cuda_source._nvrtc.cache_clear()
    with pytest.raises(ImportError, match=r"none of libnvrtc\.so\.0 is installed beside torch"):
        cuda_source._nvrtc()
    cuda_source._nvrtc.cache_clear()
