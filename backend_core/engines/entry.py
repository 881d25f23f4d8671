"""What the entry points of every family do: import its adapter of an engine and let it register.

An exception in an entry point ends every process of vLLM, with or without the flag, and is only
logged by sglang. So it is one line of ours, and an error where the flag asks for the family.
"""

from __future__ import annotations

import importlib

from backend_core.strict import logger, strict_mode


def register_vllm(family: str, adapter: str) -> None:
    """Run ``register()`` of the module ``adapter`` in a process of vLLM; never raises.

    A failure is logged, and reported by `vllm_flag` for every model that the flag is passed for.
    """
    try:
        importlib.import_module(adapter).register()
    except Exception as error:
        from backend_core.engines import vllm_flag

        vllm_flag.report_broken(family, error)


def register_sglang(family: str, adapter: str) -> None:
    """Run ``register()`` of the module ``adapter`` in a process of sglang.

    Raises:
        SystemExit: it failed, in strict mode; sglang would serve upstream's kernels.
    """
    try:
        importlib.import_module(adapter).register()
    except Exception as error:
        reason = (
            f"kda-dsv4-backend could not register {family} with sglang:"
            f" {type(error).__name__}: {error}"
        )
        if strict_mode():
            raise SystemExit(reason) from error
        logger.warning("%s", reason)
