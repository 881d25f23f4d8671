"""Entry points: the functions that engines call when they start."""

from __future__ import annotations

from backend_core.strict import logger, strict_mode


def register_vllm() -> None:
    """Entry point ``vllm.general_plugins``."""
    from dsv4_backend.engines import vllm

    vllm.register()


def register_sglang() -> None:
    """Entry point ``sglang.srt.plugins``.

    sglang logs an exception from here and serves stock code; in strict mode the process ends.
    """
    try:
        from dsv4_backend.engines import sglang

        sglang.register()
    except Exception as error:
        reason = f"kda-dsv4-backend could not register with sglang: {type(error).__name__}: {error}"
        if strict_mode():
            raise SystemExit(reason) from error
        logger.warning("%s", reason)
