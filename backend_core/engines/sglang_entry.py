"""What both entry points for sglang do: it logs an exception from a plug-in and goes on."""

from __future__ import annotations

import importlib

from backend_core.strict import logger, strict_mode


def register_adapter(module: str) -> None:
    """Run ``module.register()``; a failure is one line of ours, and the end of a strict process.

    Raises:
        SystemExit: in strict mode, with the reason.
    """
    try:
        importlib.import_module(module).register()
    except Exception as error:
        reason = f"kda-dsv4-backend could not register with sglang: {type(error).__name__}: {error}"
        if strict_mode():
            raise SystemExit(reason) from error
        logger.warning("%s", reason)
