"""A real sglang server in a process group of its own, for the benchmarks that ask one over HTTP."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.vllm_server import RECALL, Server

IDLE_S = 2.0
FLAGS = {  # the full-attention layers run on sglang's triton backend on both sides
    "upstream": ["--attention-backend", "triton"],
    "flag": [
        *("--attention-backend", "kda"),
        *("--prefill-attention-backend", "triton", "--decode-attention-backend", "triton"),
    ],
}


class SglangServer(Server):
    """As `Server`; ``options`` are those of ``sglang.launch_server``."""

    COUNTED = (
        *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
        *("sglang:num_retracted_requests_total", "sglang:cached_tokens_total"),
        *("sglang:num_aborted_requests_total", "sglang:prompt_tokens_total", "sglang:mamba_usage"),
    )

    def __init__(
        self,
        options: list[str],
        port: int,
        log: Path,
        timeout: float = 300.0,
        environment: dict[str, str] | None = None,
        model: Path = RECALL / "checkpoint",
    ) -> None:
        super().__init__([], port, log, timeout, environment, model)
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--served-model-name", "recall", "--port", str(port), "--dtype", "bfloat16"),
            *("--context-length", "4096", "--mem-fraction-static", "0.4"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--enable-cache-report", *options),
        ]
        self.environment = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            **(environment or {}),
        }

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 300.0) -> Any:
        """As `Server.post`, of a server that has had time to put its last request away: sglang
        asserts that it is idle before it releases memory."""
        time.sleep(IDLE_S)
        return super().post(path, body, timeout)

    def is_ready(self) -> bool:
        """Once it has answered its own first request."""
        return "The server is fired up" in self.log.read_text(errors="replace")
