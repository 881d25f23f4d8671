"""Kernels run natively on a GPU, and without one under Triton's interpreter, which must be on when
they are read. Tests marked ``interpreter`` run on CPU tensors, and are skipped on a GPU machine.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator

import pytest
import torch

from tests.gpu_context import end_if_broken

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    from backend_core.testing.interpreter import mend_the_interpreter
    from tests.interpreter import spare_repeated_work

    mend_the_interpreter()
    spare_repeated_work()


def pytest_configure(config: pytest.Config) -> None:
    # the interpreter's own: one-element arrays as integers, and what a GPU does silently
    for warning in (
        "Conversion of an array with ndim:DeprecationWarning",
        "overflow encountered:RuntimeWarning",
        "invalid value encountered:RuntimeWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ON_GPU and os.environ.get("TRITON_INTERPRET") == "1":
        return
    how = "runs on CPU tensors in Triton's interpreter: TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES="
    for item in items:
        if item.get_closest_marker("interpreter") is not None:
            item.add_marker(pytest.mark.skip(reason=how))


@pytest.fixture(autouse=True)
def whole_context(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU, a test that breaks the context ends its worker: it is named, and not the tests
    after it."""
    yield
    if ON_GPU and torch.cuda.is_initialized():
        end_if_broken(request, torch.cuda.synchronize)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Workers of pytest-xdist share the cores; more threads only wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh for each test on a GPU; on a CPU made from the test's name, since Triton's interpreter
    truncates to bf16, which rare inputs show. KDA_TEST_SEED sets it. Shown when a test fails."""
    given = os.environ.get("KDA_TEST_SEED")
    if given:
        value = int(given)
    elif ON_GPU:
        value = random.SystemRandom().getrandbits(31)
    else:
        value = zlib.crc32(request.node.name.encode()) >> 1
    print(f"inputs of KDA_TEST_SEED={value}")
    return value
