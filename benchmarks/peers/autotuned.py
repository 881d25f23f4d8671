"""Autotuned Triton kernels of peers, whose variants are compiled side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.autotuner import Autotuner


def compile_side_by_side() -> None:
    """Have each autotuner of this process compile its variants in threads before it times them.

    Triton compiles them one after another, which for all shapes of FLA's prefill takes a quarter of
    an hour. A variant that does not compile fails again where the autotuner runs it, which leaves
    it out.
    """
    prune = Autotuner.prune_configs

    def compiled(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        given = {**kwargs, "warmup": True}
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.run(*self.nargs.values(), **given, **config.all_kwargs())
        return configs

    Autotuner.prune_configs = compiled
