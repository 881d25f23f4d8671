"""The kernels compile with the Triton that the newest engines bring, which is not that of CI."""

from __future__ import annotations

import pytest

from tests.core.test_compiled_kernels import written
from tests.triton_releases import FAMILIES, NEWEST, compiled_under, kernels


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_is_among_those_compiled(family: str) -> None:
    assert {name for name, _ in kernels(family, "sm90")} >= written(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_for_hopper(family: str) -> None:
    found = compiled_under(NEWEST, family, "sm90")
    assert set(found) == {name for name, _ in kernels(family, "sm90")}
    assert {name: line for name, line in found.items() if isinstance(line, str)} == {}
