"""Compiled kernels on disk: what is damaged, foreign or in the way never reaches the driver."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend_core import strict
from backend_core.launch import cubin_cache
from backend_core.launch import cuda as cuda_source

ROOT = Path(__file__).parents[2]
NAME = "scan-0123.cubin"
IMAGE = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(strict, "_reported", set())
    return tmp_path / "cache" / "kda-dsv4" / "cubins"


def test_the_folder_and_the_files_are_the_user_s_alone(folder: Path) -> None:
    cubin_cache.store(NAME, IMAGE)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
    folder.chmod(0o777)  # as another program left it
    assert cubin_cache.load(NAME) == IMAGE
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE = {
    "cut": (lambda x: x[:-1], "does not have the content"),
    "cut in the head": (lambda x: x[:20], "is not of this version, or was cut short"),
    "empty": (lambda x: b"", "is not of this version, or was cut short"),
    "one bit of the code": (lambda x: changed(x, 1000), "does not have the content"),
    "one bit of the digest": (lambda x: changed(x, 20), "does not have the content"),
    "a bare cubin": (lambda x: b"\x7fELF" + IMAGE, "is not of this version, or was cut short"),
    "too large": (lambda x: x + b"\0" * cubin_cache.MAX_BYTES, "has 67134504 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_again(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, why = DAMAGE[damage]
    cubin_cache.store(NAME, IMAGE)
    (folder / NAME).write_bytes(change((folder / NAME).read_bytes()))
    with caplog.at_level(logging.WARNING, "kda_dsv4"):
        assert cubin_cache.load(NAME) is None
    assert why in caplog.text and "it is compiled again" in caplog.text
    cubin_cache.store(NAME, IMAGE)
    assert cubin_cache.load(NAME) == IMAGE


def test_another_kernel_s_file_is_not_this_one_s(folder: Path) -> None:
    cubin_cache.store(NAME, IMAGE)
    os.rename(folder / NAME, folder / "decode_step-4567.cubin")
    assert cubin_cache.load("decode_step-4567.cubin") is None


def test_a_link_a_pipe_and_a_folder_are_not_read(folder: Path, tmp_path: Path) -> None:
    cubin_cache.store(NAME, IMAGE)
    os.rename(folder / NAME, tmp_path / "elsewhere")
    (folder / NAME).symlink_to(tmp_path / "elsewhere")
    assert cubin_cache.load(NAME) is None
    (folder / NAME).unlink()
    os.mkfifo(folder / NAME)
    assert cubin_cache.load(NAME) is None
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    assert cubin_cache.load(NAME) is None


def test_a_folder_of_somebody_else_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cubin_cache.store(NAME, IMAGE)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with caplog.at_level(logging.WARNING, "kda_dsv4"):
        assert cubin_cache.load(NAME) is None
    assert "must be a folder of user 4242" in caplog.text


def test_a_folder_that_is_a_link_is_not_used(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir(parents=True)
    (tmp_path / "real").mkdir()
    folder.symlink_to(tmp_path / "real")
    cubin_cache.store(NAME, IMAGE)
    assert cubin_cache.load(NAME) is None and not list((tmp_path / "real").iterdir())


def test_a_user_without_a_home_compiles_at_every_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's user of any number has no entry in /etc/passwd, and may have no HOME."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with caplog.at_level(logging.WARNING, "kda_dsv4"):
        cubin_cache.store(NAME, IMAGE)
        assert cubin_cache.load(NAME) is None
    assert caplog.text.count("this user has no home and XDG_CACHE_HOME is not set") == 1


@pytest.mark.parametrize("error", [30, 28], ids=["read-only", "full"])
def test_what_cannot_be_kept_is_said_once_and_leaves_nothing(
    folder: Path, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes of a full disk do not come to an end; a read-only one has no file at all."""
    cubin_cache.store("other.cubin", IMAGE)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(error, os.strerror(error))

    place = cubin_cache.os if error == 28 else cubin_cache.tempfile
    monkeypatch.setattr(place, "replace" if error == 28 else "NamedTemporaryFile", refuse)
    with caplog.at_level(logging.WARNING, "kda_dsv4"):
        for _ in range(2):
            cubin_cache.store(NAME, IMAGE)
    assert caplog.text.count("cannot be kept in") == 1 and os.strerror(error) in caplog.text
    assert [file.name for file in folder.iterdir()] == ["other.cubin"]


WRITER = """
import sys
from backend_core.launch import cubin_cache
image = bytes([int(sys.argv[1])]) * 1_000_000
for _ in range(60):
    cubin_cache.store("same.cubin", image)
    found = cubin_cache.load("same.cubin")
    assert found is not None and len(found) == 1_000_000 and len(set(found)) == 1
"""


def test_processes_that_compile_at_once_never_read_half_a_file(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(n)], env=environment, cwd=ROOT)
        for n in range(3)
    ]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert [file.name for file in folder.iterdir()] == ["same.cubin"]


class Driver:
    """A driver of some version, which takes no image."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, to: object) -> int:  # noqa: N802
        ctypes.cast(to, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return 0

    def cuModuleLoadData(self, *args: object) -> int:  # noqa: N802
        return 222


class Compiler:
    """NVRTC 13.1."""

    def nvrtcVersion(self, major: object, minor: object) -> None:  # noqa: N802
        ctypes.cast(major, ctypes.POINTER(ctypes.c_int))[0] = 13
        ctypes.cast(minor, ctypes.POINTER(ctypes.c_int))[0] = 1


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "_driver", lambda: Driver(12080))
    monkeypatch.setattr(cuda_source, "_nvrtc", Compiler)
    monkeypatch.setattr(cuda_source, "_driver_error", lambda status: f"error {status}")
    monkeypatch.setattr(cuda_source.torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(cuda_source.torch, "empty", lambda *args, **kwargs: None)


OLD = "the NVIDIA driver is one for CUDA 12.8, and the NVRTC that torch brought is of CUDA 13.1"


def test_a_driver_that_is_too_old_is_named(
    old_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=rf"loading scan failed: error 222; {OLD}: update"):
        cuda_source._load(IMAGE, "scan", 0)
    cuda_source._launch.cache_clear()
    with pytest.raises(RuntimeError, match=f"the NVIDIA driver has no cuLaunchKernelEx; {OLD}"):
        cuda_source._launch()
    cuda_source._launch.cache_clear()
    monkeypatch.setattr(cuda_source, "_driver", lambda: Driver(13010))
    with pytest.raises(RuntimeError, match=r"loading scan failed: error 222$"):
        cuda_source._load(IMAGE, "scan", 0)
