"""These tests run in an environment with sglang (``make test-engines``); others do without."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["*"]
else:
    from tests.engines.sglang.conftest import (  # noqa: F401
        fresh_reports,
        inference,
        said,
    )
