from __future__ import annotations

import pytest

from tests.engines.vllm_process import model_dtype, one_rank  # noqa: F401


@pytest.fixture(autouse=True)
def under_the_models_dtype(model_dtype: None) -> None:  # noqa: F811
    """Every test builds layers."""
