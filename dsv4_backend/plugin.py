"""Entry points: the functions that engines call when they start."""

from __future__ import annotations


def register_vllm() -> None:
    """Entry point ``vllm.general_plugins``."""
    from dsv4_backend.engines import vllm

    vllm.register()
