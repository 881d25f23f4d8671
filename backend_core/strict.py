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


def is_on(variable: str) -> bool:
    """Whether an environment variable is set, and to none of ``0``, ``false``, ``no``, ``off``."""
    return os.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no", "off")


def choice(variable: str) -> bool | None:
    """`is_on` of an environment variable that is set, and ``None`` of one that is not."""
    return is_on(variable) if os.environ.get(variable, "").strip() else None


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
