"""Entry points: the functions that engines call when they start."""

from __future__ import annotations


def register_vllm() -> None:
    """Entry point ``vllm.general_plugins``."""
    from kda_backend.engines import vllm

    vllm.register()


def register_sglang() -> None:
    """Entry point ``sglang.srt.plugins``."""
    from backend_core.engines.sglang_entry import register_adapter

    register_adapter("kda_backend.engines.sglang")
