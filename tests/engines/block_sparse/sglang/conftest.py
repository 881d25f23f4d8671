from __future__ import annotations

import importlib.util

if importlib.util.find_spec("sglang") is not None:
    from tests.engines.sglang_process import inference  # noqa: F401
