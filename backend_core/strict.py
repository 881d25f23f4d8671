"""Fallbacks: this package cannot serve a call, and upstream's code would.

``KDA_DSV4_STRICT=1`` turns every such fallback into an error; otherwise each reason is logged
once, as a warning of the logger ``kda_dsv4``.
"""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger("kda_dsv4")

_reported: set[str] = set()
_reporting = threading.Lock()


class FallbackError(RuntimeError):
    """A fallback to upstream's code was refused because strict mode is on."""


_OFF = ("0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


def is_on(variable: str) -> bool:
    """Whether an environment variable is set, and to none of ``0``, ``false``, ``no``, ``off``."""
    return os.environ.get(variable, "").strip().lower() not in ("", *_OFF)


def choice(variable: str) -> bool | None:
    """Read an environment variable that is on or off; ``None`` where it is not set.

    Raises:
        ValueError: it is set to another word than on or off.
    """
    given = os.environ.get(variable, "").strip().lower()
    if given and given not in (*_OFF, *_ON):
        raise ValueError(f"{variable} must be 0 or 1, got {given!r}")
    return given in _ON if given else None


def strict_mode() -> bool:
    """Whether ``KDA_DSV4_STRICT`` is on."""
    return is_on("KDA_DSV4_STRICT")


def fallback(reason: str) -> None:
    """Report, before running upstream's code, why it runs: one line for each reason.

    Raises:
        FallbackError: in strict mode.
    """
    if strict_mode():
        raise FallbackError(f"KDA_DSV4_STRICT forbids falling back to upstream's code: {reason}")
    warn_once(f"falling back to upstream's code: {reason}")


def decline(line: str) -> None:
    """Report what a user asked for and this package does in another way: one line for each.

    Raises:
        FallbackError: in strict mode.
    """
    if strict_mode():
        raise FallbackError(f"KDA_DSV4_STRICT forbids it: {line}")
    warn_once(line)


def warn_once(line: str) -> None:
    """Log a warning, each line once in the process, whichever thread says it first."""
    with _reporting:
        if line not in _reported:
            _reported.add(line)
            logger.warning("%s", line)
