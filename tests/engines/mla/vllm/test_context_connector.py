"""The benchmark's contexts: vLLM's scheduler takes every prompt as read but for its last token."""

from __future__ import annotations

import math

import pytest
import torch
import vllm
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config

from backend_core.engines import Engine
from tests.engines.mla.vllm.harness import engine_config

PAGE = 944


@pytest.mark.skipif(
    not Engine("vllm", "0.33.0", None).supports(vllm.__version__),
    reason="the benchmark is for this release's connector and scheduler",
)
def test_a_batch_of_long_prompts_is_a_decode_step_at_once() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
    )
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    config = engine_config(
        kv_transfer_config=KVTransferConfig(
            kv_connector="ContextConnector",
            kv_connector_module_path="benchmarks.engines.context_connector",
            kv_role="kv_both",
        ),
        max_num_batched_tokens=64,
    )
    latent = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    states = MambaSpec(
        block_size=4096,
        shapes=((768, 3), (2, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=PAGE * 1152,
        mamba_type="gdn_attention",
        mamba_cache_mode="none",
    )
    groups = [KVCacheGroupSpec(["mla"], latent), KVCacheGroupSpec(["kda"], states)]
    config.cache_config.num_gpu_blocks = 64
    cache = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
    with set_current_vllm_config(config):
        scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=math.lcm(PAGE, 4096)
        )
        for name in "abcd":
            sampling = SamplingParams(max_tokens=8, ignore_eos=True)
            scheduler.add_request(Request(name, list(range(3000)), sampling, None))
        step = scheduler.schedule()
    assert step.num_scheduled_tokens == dict.fromkeys("abcd", 1)
    for request in step.scheduled_new_reqs:
        assert request.num_computed_tokens == 2999
        assert [len(blocks) for blocks in request.block_ids] == [4, 1]
    assert len(step.new_block_ids_to_zero) == 16  # no value of another request is read
