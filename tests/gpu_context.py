"""What a test leaves of its process's CUDA or HIP context.

A kernel that reads or writes where it must not breaks the context, and often after its launch has
returned: the test may even pass, and all later tests of the process fail in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


def end_if_broken(request: pytest.FixtureRequest, synchronise: Callable[[], None]) -> None:
    """End this process, with the test's name, if the GPU's work has failed.

    A worker of pytest-xdist ends at once: the plugin reports the test and goes on in a fresh
    worker. Without workers the whole run ends, with a report of the tests so far.

    Args:
        synchronise: waits for the GPU; what it raises says that the context is broken.
    """
    try:
        synchronise()
    except Exception as error:
        what = f"{request.node.nodeid} has broken the GPU's context: {error}"
    else:
        return
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(what, returncode=1)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture()
    os.write(2, f"\n{what}\n".encode())  # flushed as it is written
    os._exit(1)
