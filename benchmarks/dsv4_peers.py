"""Peers of the compressor benchmark: vLLM's Triton kernels, and the operation before it was one."""

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

from backend_core.kernels.rope_hadamard import hadamard, load_angles, rope_tail
from dsv4_backend import PagedDecode, SeqLens, compress_norm_rope_hadamard_
from dsv4_backend.kernels.finish import rms_norm
from dsv4_backend.kernels.norm_rope_rotate import norm_rope_rotate_kernel
from dsv4_backend.testing.steps import TimedStep

EPS = 1e-6


def load_vllm(source: Path | None) -> types.SimpleNamespace | None:
    """vLLM's compressor kernels, or ``None``; ``source`` needs no other part of vLLM."""
    if source is not None:
        for name in ("vllm", "vllm.models", "vllm.models.deepseek_v4", "vllm.utils"):
            sys.modules[name] = package = types.ModuleType(name)
            package.__path__ = [str(source / name.replace(".", "/"))]
        common = types.ModuleType("vllm.models.deepseek_v4.common")
        common.__path__ = [str(source / "vllm/models/deepseek_v4/common")]
        ops = types.ModuleType("vllm.models.deepseek_v4.common.ops")
        ops.__path__ = [str(source / "vllm/models/deepseek_v4/common/ops")]
        platform = types.SimpleNamespace(
            is_rocm=lambda: torch.version.hip is not None, fp8_dtype=lambda: torch.float8_e4m3fn
        )
        stubs = {
            "vllm.models.deepseek_v4.common": common,
            "vllm.models.deepseek_v4.common.ops": ops,
            "vllm.triton_utils": types.SimpleNamespace(tl=tl, triton=triton),
            "vllm.platforms": types.SimpleNamespace(current_platform=platform),
            "vllm.utils.import_utils": types.SimpleNamespace(has_cutedsl=lambda: False),
        }
        sys.modules.update(stubs)  # type: ignore[arg-type]
    root = "vllm.models.deepseek_v4.common.ops"
    try:
        save = importlib.import_module(f"{root}.save_partial_states")
        store = importlib.import_module(f"{root}.fused_compress_quant_cache")
        queries = importlib.import_module(f"{root}.fused_indexer_q")
    except ImportError as error:
        print(f"vLLM's kernels are left out: {error}", flush=True)
        return None
    return types.SimpleNamespace(
        save=save.save_partial_states,
        store=store.compress_norm_rope_store_triton,
        two_stage=store.compress_norm_rope_store_two_stage_triton,
        queries=queries.fused_indexer_q_rope_quant,
    )


def vllm_step(vllm: types.SimpleNamespace, part: TimedStep) -> Callable[[], None]:
    """Both of vLLM's launches on the same tensors, by its own dispatch for Triton."""
    spec, plan = part.layer.spec, part.step_plan
    half = spec.row_width // 2
    kv, score = part.kv_score[:, :half], part.kv_score[:, half:]
    ape = part.layer.ape.flatten(1)
    block = part.state.shape[1]
    data, scales = spec.record.data_bytes, spec.record.scale_bytes
    page = part.cache.shape[1]
    shape, strides = (
        (part.cache.shape[0], spec.page_tokens, data + scales),
        (page, data + scales, 1),
    )
    common: dict[str, Any] = {
        "state_cache": part.state,
        "num_actual": plan.num_tokens,
        "token_to_req_indices": plan.requests,
        "positions": plan.positions,
        "slot_mapping": plan.state_slots,
        "block_table": plan.block_table,
        "block_size": block,
        "state_width": half,
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
    store = vllm.store
    if spec.compress_ratio == 128:
        store = vllm.two_stage
        decodes = plan.num_tokens if isinstance(plan, PagedDecode) else 0
        scratch = torch.empty(plan.num_tokens, spec.head_dim, device="cuda")
        common |= {"num_decode_tokens": decodes, "compress_scratch": scratch}

    def step() -> None:
        vllm.save(
            kv, score, ape, plan.positions, part.state, plan.state_slots, block, half,
            spec.compress_ratio, {},
        )  # fmt: skip
        store(**common)

    return step


@triton.jit
def hadamard_kernel(x_ptr, stride_x_r, D: tl.constexpr):
    row_ptr = x_ptr + tl.program_id(0).to(tl.int64) * stride_x_r + tl.arange(0, D)
    tl.store(row_ptr, hadamard(tl.load(row_ptr), D))


@triton.jit
def through_memory_kernel(
    x_ptr, weight_ptr, table_ptr, seq_len_ptr, eps, stride_x_r, stride_table_p, D: tl.constexpr
):
    """Norm and RoPE, then each butterfly stage as a store and two loads between barriers."""
    i_n = tl.program_id(0)
    o_d = tl.arange(0, D)
    row_ptr = x_ptr + i_n.to(tl.int64) * stride_x_r
    b_x = rms_norm(tl.load(row_ptr + o_d), tl.load(weight_ptr + o_d), eps, D)
    b_angles = load_angles(table_ptr, tl.load(seq_len_ptr + i_n) - 4, stride_table_p, D, False)
    b_x = rope_tail(b_x, b_angles, D)
    tl.store(row_ptr + o_d, b_x)
    for i_s in tl.static_range(7):
        tl.debug_barrier()
        b_self = tl.load(row_ptr + o_d)
        b_partner = tl.load(row_ptr + (o_d ^ (1 << i_s)))
        b_x = tl.where((o_d >> i_s) & 1 == 0, b_self + b_partner, b_partner - b_self)
        if i_s == 6:
            b_x = b_x * (1.0 / D**0.5)
        tl.debug_barrier()
        tl.store(row_ptr + o_d, b_x)


@triton.jit
def empty_kernel(x_ptr):
    pass


def rows_calls(n: int, rope_table: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The in-place operator on n pooled indexer rows: ours, in two launches, through memory."""
    x = torch.randn(n, 128, device="cuda")
    weight = torch.ones(128, device="cuda")
    table = torch.stack(rope_table.chunk(2, 1), -1).flatten(1).contiguous()
    seq_lens = (torch.randint(1, 4096, (n,), device="cuda") * 4).int()
    plan = SeqLens(seq_lens)

    def two_launch() -> None:
        norm_rope_rotate_kernel[(n,)](
            x, weight, table, seq_lens, EPS, 128, 64,
            D=128, RATIO=4, HAS_ROTATION=False, PDL="off", num_warps=1,
        )  # fmt: skip
        hadamard_kernel[(n,)](x, 128, D=128, num_warps=1)

    def through_memory() -> None:
        through_memory_kernel[(n,)](
            x, weight, table, seq_lens, EPS, 128, 64, D=128, num_warps=4
        )  # fmt: skip

    def one_launch() -> None:
        compress_norm_rope_hadamard_(
            x, weight, EPS, table, plan, head_dim=128, compress_ratio=4, rotate=True
        )

    return {"ours": one_launch, "two_launch": two_launch, "seed_style": through_memory}
