from __future__ import annotations

import importlib.metadata
import importlib.util

if importlib.util.find_spec("sglang") is not None:
    from tests.engines.mla.sglang import flash_attention, flash_mla
    from tests.engines.sglang_process import inference, load_plugins  # noqa: F401

    load_plugins()
    if importlib.metadata.version("sglang") == "0.5.23":
        flash_mla.install()  # before anything imports sglang's interface to it
    else:
        collect_ignore = ["test_sparse.py"]  # the calls of other releases are not taken over
    flash_attention.install()  # before anything imports sglang's backend
