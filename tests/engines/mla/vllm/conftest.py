from __future__ import annotations

import importlib.util

if importlib.util.find_spec("vllm") is not None:
    from tests.engines.mla.vllm import flash_attention

    flash_attention.install()  # before anything imports vLLM's backend

    from tests.engines.vllm_process import model_dtype, one_rank  # noqa: F401
