"""vLLM 0.33's compressor step: its Triton kernels, and the CuTeDSL ones that CUDA runs instead.

Only the files that hold the kernels are imported, so that ``source`` may be an installed
site-packages or a copy of ``vllm/{cute_utils,utils/math_utils.py,v1/attention/ops/common.py}``,
``vllm/model_executor/warmup/jit_warmup*.py`` and ``vllm/models/deepseek_v4/{common,nvidia}/ops``;
for DeepSeek-V4.1's step also of ``vllm/models/deepseek_v41/common/ops``.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.peers.sources import packages, stub
from dsv4_backend import PagedDecode
from dsv4_backend.testing.steps import TimedStep

RELEASE = "0.33.0"
_PACKAGES = (
    *("vllm.models.deepseek_v4.common.ops", "vllm.models.deepseek_v4.nvidia.ops"),
    *("vllm.model_executor.warmup", "vllm.utils", "vllm.v1.attention.ops"),
)
_ROOT = "vllm.models.deepseek_v4"


def load(source: Path) -> types.SimpleNamespace:
    """vLLM's Triton functions, as ``save``, ``store``, ``two_stage`` and ``queries``.

    Raises:
        ImportError: a file is missing from ``source``.
    """
    packages(source, *_PACKAGES)
    platform = types.SimpleNamespace(
        device_type="cuda",
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_cpu=lambda: False,
        fp8_dtype=lambda: torch.float8_e4m3fn,
    )
    envs = stub("vllm.envs", VLLM_TRITON_JIT_WARMUP_NUM_THREADS=1)
    sys.modules["vllm"].envs = envs  # type: ignore[attr-defined]
    stub("vllm.platforms", current_platform=platform)
    stub("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True)
    stub("vllm.utils.import_utils", has_cutedsl=lambda: False)
    # scales as four equal bytes are of sm_100 alone
    stub("vllm.utils.deep_gemm", mqa_logits_use_mx_scales=lambda: False)
    save = importlib.import_module(f"{_ROOT}.common.ops.save_partial_states")
    store = importlib.import_module(f"{_ROOT}.common.ops.fused_compress_quant_cache")
    queries = importlib.import_module(f"{_ROOT}.common.ops.fused_indexer_q")
    return types.SimpleNamespace(
        save=save._SAVE_PARTIAL_STATES_KERNEL,
        store=store.compress_norm_rope_store_triton,
        two_stage=store.compress_norm_rope_store_two_stage_triton,
        queries=queries.fused_indexer_q_rope_quant,
    )


def load_cutedsl(vllm: types.SimpleNamespace) -> None:
    """Add ``cutedsl``, the main compressor's kernels; needs ``load``, and CuTe DSL and quack.

    Raises:
        ImportError: one of them is not installed.
    """
    module = importlib.import_module(f"{_ROOT}.nvidia.ops.sparse_attn_compress_cutedsl")
    vllm.cutedsl = module._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL


def load_v41() -> types.SimpleNamespace:
    """DeepSeek-V4.1's functions, as ``latents``, ``main`` and ``keys``; needs ``load``.

    Raises:
        ImportError: a file is missing from its source.
    """
    name = "vllm.models.deepseek_v41.common.ops"
    packages(Path(sys.modules["vllm"].__path__[0]).parent, name)
    queries = importlib.import_module(f"{_ROOT}.common.ops.fused_indexer_q")
    vars(sys.modules[name]).update(MXFP4_BLOCK_SIZE=32, _fp32x2_to_fp4x2=queries._fp32x2_to_fp4x2)
    records = importlib.import_module(f"{name}.fused_compress_quant_cache")
    keys = importlib.import_module(f"{name}.indexer_k_store")
    return types.SimpleNamespace(
        latents=records.fused_save_compress_norm,
        main=records.rope_quant_insert,
        keys=keys.indexer_k_norm_rope_store,
    )


def _arguments(part: TimedStep) -> dict[str, Any]:
    """vLLM's arguments for every implementation of its second step."""
    spec, plan = part.layer.spec, part.step_plan
    data, scales = spec.record.data_bytes, spec.record.scale_bytes
    shape = (part.cache.shape[0], spec.page_tokens, data + scales)
    strides = (part.cache.shape[1], data + scales, 1)
    return {
        "state_cache": part.state,
        "num_actual": plan.num_tokens,
        "token_to_req_indices": plan.requests,  # type: ignore[union-attr]
        "positions": plan.positions,  # type: ignore[union-attr]
        "slot_mapping": plan.state_slots,  # type: ignore[union-attr]
        "block_table": plan.block_table,  # type: ignore[union-attr]
        "block_size": part.state.shape[1],
        "state_width": spec.row_width // 2,
        "cos_sin_cache": part.layer.rope_table,
        "kv_cache": part.cache.as_strided(shape, strides),
        "k_cache_metadata": types.SimpleNamespace(slot_mapping=plan.slots),
        "pdl_kwargs": {},
        "head_dim": spec.head_dim,
        "rope_head_dim": 64,
        "compress_ratio": spec.compress_ratio,
        "overlap": spec.halves == 2,
        "use_fp4_cache": False,
        "rms_norm_weight": part.layer.norm_weight,
        "rms_norm_eps": spec.eps,
        "quant_block": 64 if spec.head_dim == 512 else 128,
        "token_stride": data,
        "scale_dim": scales,
    }


def _step(
    vllm: types.SimpleNamespace, part: TimedStep, store: Callable[..., object], **more: Any
) -> Callable[[], None]:
    """vLLM's step on these tensors: the state rows, then ``store``, both by its own Python."""
    spec, plan = part.layer.spec, part.step_plan
    half = spec.row_width // 2
    # fp32 as the projections' product is
    kv, score = part.kv_score[:, :half], part.kv_score[:, half:]
    ape, arguments = part.layer.ape.flatten(1), _arguments(part) | more

    def step() -> None:
        vllm.save(
            kv=kv,
            score=score,
            ape=ape,
            positions=plan.positions,  # type: ignore[union-attr]
            state_cache=part.state,
            slot_mapping=plan.state_slots,  # type: ignore[union-attr]
            block_size=part.state.shape[1],
            state_width=half,
            compress_ratio=spec.compress_ratio,
            pdl_kwargs={},
        )
        store(**arguments)

    return step


def triton_step(vllm: types.SimpleNamespace, part: TimedStep) -> Callable[[], None]:
    """The step in Triton: what a GPU without CuTe DSL runs, and the indexer everywhere."""
    spec, plan = part.layer.spec, part.step_plan
    if spec.compress_ratio != 128:
        return _step(vllm, part, vllm.store)
    decodes = plan.num_tokens if isinstance(plan, PagedDecode) else 0
    scratch = torch.empty(plan.num_tokens, spec.head_dim, device=part.kv_score.device)
    more = {"num_decode_tokens": decodes, "compress_scratch": scratch}
    return _step(vllm, part, vllm.two_stage, **more)


def upstream_step(vllm: types.SimpleNamespace, part: TimedStep) -> Callable[[], None]:
    """The step as vLLM's own dispatch takes it on CUDA: CuTeDSL for the main compressor alone."""
    if part.layer.spec.head_dim != 512:
        return triton_step(vllm, part)
    return _step(vllm, part, vllm.cutedsl)
