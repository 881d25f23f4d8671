from __future__ import annotations

import importlib.metadata
import importlib.util

if importlib.util.find_spec("sglang") is not None:
    from tests.engines.sglang_process import inference  # noqa: F401

    if importlib.metadata.version("sglang") == "0.5.22":
        # the hooks are written against that release, and no other environment has diffusers
        collect_ignore = ["test_attention.py", "test_diffusers.py"]
