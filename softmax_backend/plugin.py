"""Entry points: the functions that engines call when they start."""

from __future__ import annotations

from backend_core.engines import entry


def register_vllm() -> None:
    """Entry point ``softmax`` of ``vllm.general_plugins``."""
    entry.register_vllm("softmax", "softmax_backend.engines.vllm")


def register_sglang() -> None:
    """Entry point ``softmax`` of ``sglang.srt.plugins``."""
    entry.register_sglang("softmax", "softmax_backend.engines.sglang")
