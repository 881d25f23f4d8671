"""Entry points: the functions that engines call when they start."""

from __future__ import annotations

from backend_core.engines import entry


def register_vllm() -> None:
    """Entry point ``dsv4`` of ``vllm.general_plugins``."""
    entry.register_vllm("dsv4", "dsv4_backend.engines.vllm")


def register_sglang() -> None:
    """Entry point ``dsv4`` of ``sglang.srt.plugins``."""
    entry.register_sglang("dsv4", "dsv4_backend.engines.sglang")
