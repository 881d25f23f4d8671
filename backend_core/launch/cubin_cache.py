"""Compiled kernels on disk: private to the user, checked when they are read, written whole or not.

A cubin is code that runs with the rights of the engine. So its folder belongs to this user and to
nobody else, and its file says which kernel it is of and what its bytes hash to. A file that is cut,
changed, or another kernel's is compiled again, as is everything where no folder can be had: the
cache saves seconds of a start and never decides whether an engine starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from backend_core.strict import warn_once

MAGIC = b"kda-dsv4"
MAX_BYTES = 64 << 20
"""No kernel's cubin comes near it; what is larger is not read."""
_DIGEST = 32


def directory() -> Path:
    """``$XDG_CACHE_HOME/kda-dsv4/cubins``, by default below ``~/.cache``.

    Raises RuntimeError where this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kda-dsv4" / "cubins"


def load(name: str) -> bytes | None:
    """The image that was stored under a name, or ``None`` without a trusted one."""
    folder = _private()
    if folder is None:
        return None
    path = folder / name
    try:
        # a link could name any file
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        _distrust(path, f"cannot be opened ({error.strerror})")
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):  # Python opens no folder
        os.close(descriptor)
        _distrust(path, "is no regular file")
        return None
    with open(descriptor, "rb") as file:
        if status.st_size > MAX_BYTES:
            _distrust(path, f"has {status.st_size} bytes, and at most {MAX_BYTES} are read")
            return None
        content = file.read(MAX_BYTES)
    head = len(MAGIC) + _DIGEST
    if len(content) < head or not content.startswith(MAGIC):
        _distrust(path, "is not of this version, or was cut short")
        return None
    image = content[head:]
    if content[len(MAGIC) : head] != _digest(name, image):
        _distrust(path, "does not have the content that was written")
        return None
    return image


def store(name: str, image: bytes) -> None:
    """Keep an image under a name. Several processes may do so at once: each writes a file of its
    own and then gives it the name. Where it cannot be kept, that is logged once."""
    folder = _private()
    if folder is None:
        return
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            temporary = file.name
            file.write(MAGIC + _digest(name, image) + image)
        os.replace(temporary, folder / name)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        warn_once(
            f"compiled kernels cannot be kept in {folder} ({error.strerror}): the next start "
            "compiles them again"
        )


def _digest(name: str, image: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + image).digest()


def _private() -> Path | None:
    """The folder, made if need be; ``None`` where it cannot be this user's alone."""
    try:
        folder = directory()
    except RuntimeError:
        warn_once(
            "compiled kernels are not kept, since this user has no home and XDG_CACHE_HOME is not"
            " set: every start compiles them"
        )
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
        if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
            warn_once(
                f"compiled kernels are not kept in {folder}, which must be a folder of user "
                f"{os.geteuid()} and is one of user {status.st_uid} or a link: every start "
                "compiles them"
            )
            return None
        if status.st_mode & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        warn_once(
            f"compiled kernels cannot be kept in {folder} ({error.strerror}): the next start "
            "compiles them again"
        )
        return None
    return folder


def _distrust(path: Path, why: str) -> None:
    warn_once(f"the compiled kernel {path} {why}: it is compiled again")
