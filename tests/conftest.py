"""Without a GPU the kernels run under Triton's interpreter, which must be on when they are read."""

from __future__ import annotations

import os
import random
import zlib

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import spare_repeated_work

    spare_repeated_work()


def pytest_configure(config: pytest.Config) -> None:
    # the interpreter's own: one-element arrays as integers, and what a GPU does silently
    for warning in (
        "Conversion of an array with ndim:DeprecationWarning",
        "overflow encountered:RuntimeWarning",
        "invalid value encountered:RuntimeWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Workers of pytest-xdist share the cores; more threads only wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU under the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh for each test on a GPU; on a CPU made from the test's name, since Triton's interpreter
    truncates to bf16, which rare inputs show. KDA_TEST_SEED sets it. Shown when a test fails."""
    given = os.environ.get("KDA_TEST_SEED")
    if given:
        value = int(given)
    elif torch.cuda.is_available():
        value = random.SystemRandom().getrandbits(31)
    else:
        value = zlib.crc32(request.node.name.encode()) >> 1
    print(f"inputs of KDA_TEST_SEED={value}")
    return value
