"""A KV connector that gives decode benchmarks their context without a prefill.

vLLM's own DecodeBenchConnector tells the scheduler that all tokens of a prompt but the last are in
the cache already, as after a prefill on another server; pages are allocated and read as always.
It then fills them with one value. That is left out here: in a model with linear attention the pages
of both kinds of layer are one memory, and a value of the one kind is nonsense as the other. vLLM
zeroes the pages of such a model before it hands them out, so the cache holds zeros: attention takes
its time over the same bytes, and requests differ by their last tokens alone.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
)


class ContextConnector(DecodeBenchConnector):  # type: ignore[misc]
    """`DecodeBenchConnector` without its fill."""

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Leave the pages as vLLM hands them out."""
