from __future__ import annotations

from tests.engines.vllm_process import one_rank  # noqa: F401
