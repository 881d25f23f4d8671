from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is not None:
    from kda_backend.engines.vllm import register
    from tests.engines.kda.vllm.harness import NGRAM, bind_cache, engine_config
    from tests.engines.kda.vllm.models import MODELS, Model, build
    from tests.engines.vllm_process import model_dtype, one_rank  # noqa: F401

    @pytest.fixture(scope="session", autouse=True)
    def registered() -> None:
        register()

    @pytest.fixture(params=sorted(MODELS))
    def model(request: pytest.FixtureRequest) -> Model:
        return MODELS[request.param]

    @pytest.fixture(autouse=True)
    def under_the_models_dtype(model_dtype: None) -> None:  # noqa: F811
        """Every test builds layers."""

    @pytest.fixture
    def config() -> Any:
        """In fp32, as what is built under it: with ``in_fp32``."""
        return engine_config(flag=True, dtype="float32")

    @pytest.fixture
    def drafting() -> Any:
        return engine_config(flag=True, dtype="float32", speculative_config=NGRAM)

    @pytest.fixture
    def layer(model: Model, config: Any) -> Any:
        built = build(model, config)
        bind_cache(built, config)
        return built

    @pytest.fixture
    def in_fp32(under_the_models_dtype: None) -> None:
        torch.set_default_dtype(torch.float32)  # the other fixture sets it back
