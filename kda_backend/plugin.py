"""Entry points: the functions that engines call when they start."""

from __future__ import annotations

from backend_core.engines import entry


def register_vllm() -> None:
    """Entry point ``kda`` of ``vllm.general_plugins``."""
    entry.register_vllm("kda", "kda_backend.engines.vllm")


def register_sglang() -> None:
    """Entry point ``kda`` of ``sglang.srt.plugins``."""
    entry.register_sglang("kda", "kda_backend.engines.sglang")
