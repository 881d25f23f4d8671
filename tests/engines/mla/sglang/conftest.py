from __future__ import annotations

import importlib.util

from backend_core.engines import seams
from mla_backend.engines.seam_list import SGLANG_SPARSE

if importlib.util.find_spec("sglang") is not None:
    from tests.engines.mla.sglang import flash_attention, flash_mla
    from tests.engines.sglang_process import inference, load_plugins  # noqa: F401

    load_plugins()
    if seams.difference(SGLANG_SPARSE) is None:
        flash_mla.install()  # before anything imports sglang's interface to it
    else:
        collect_ignore = ["test_sparse.py"]  # 0.5.22 imports its calls from elsewhere
    flash_attention.install()  # before anything imports sglang's backend
