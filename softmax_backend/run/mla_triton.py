"""MLA decode in Triton: the main kernel over the work list, then combine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from backend_core.contracts import expect_near, interprets
from backend_core.tables.schema import KernelPath
from softmax_backend import combine
from softmax_backend.contract.mla_decode import MlaInputs
from softmax_backend.contract.sparse_mla import token_stride
from softmax_backend.scratch import Scratch
from softmax_backend.spec import LATENT_DIM, MlaSpec
from softmax_backend.variants import Variant

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

_CACHES = {"16-bit": 0, "fp8": 1, "fp8_ds_mla": 2}


def decode(path: KernelPath, x: MlaInputs, scratch: Scratch, pdl_prefetch_safe: bool) -> None:
    """Two launches: partial outputs or, where a tile has one split, the output; then the merge."""
    expect_near("q_latent", x.q_latent, 2)
    expect_near("q_rope", x.q_rope, 2)
    prefix = x.plan.prefix
    rows = 64 if prefix is not None else x.spec.query_rows
    partial_out, partial_lse = scratch.reserve(x.plan.num_slots, rows, LATENT_DIM)
    block_rows = block_rows_of(path, rows)
    kernel = decode_kernel(path, x.spec, x.causal, operand_dtype(x.q_latent), block_rows)
    arguments: dict[str, Any] = {
        "q_latent_ptr": x.q_latent,
        "q_rope_ptr": x.q_rope,
        "kv_latent_ptr": x.kv_latent,
        "kv_rope_ptr": x.kv_rope,
        "kv_scales_ptr": x.kv_scales,
        "block_table_ptr": x.block_table,
        "lengths_ptr": x.plan.lengths,
        "work_ptr": x.plan.work,
        "num_splits_ptr": x.plan.num_splits,
        "tiles_ptr": None if prefix is None else prefix.tiles,
        "members_ptr": None if prefix is None else prefix.members,
        "sinks_ptr": x.sinks,
        "out_ptr": x.out,
        "lse_ptr": x.lse,
        "partial_out_ptr": partial_out,
        "partial_lse_ptr": partial_lse,
        "scale": x.scale,
        "kv_scale": x.kv_scale,
        "variant_a": x.spec.variant.a,
        "variant_b": x.spec.variant.b,
        "stride_q_latent_t": token_stride(x.q_latent),
        "stride_q_latent_h": x.q_latent.stride(2),
        "stride_q_rope_t": token_stride(x.q_rope),
        "stride_q_rope_h": x.q_rope.stride(2),
        "stride_latent_p": x.kv_latent.stride(0),
        "stride_latent_t": x.kv_latent.stride(1),
        "stride_rope_p": x.kv_rope.stride(0),
        "stride_rope_t": x.kv_rope.stride(1),
        "stride_scales_p": 0 if x.kv_scales is None else x.kv_scales.stride(0),
        "stride_scales_t": 0 if x.kv_scales is None else x.kv_scales.stride(1),
        "stride_table": x.block_table.stride(0),
        "partial_rows": rows,
        "chunk_blocks": x.plan.chunk_blocks,
        "query_tokens": x.spec.query_tokens,
        "heads": x.spec.num_heads,
    }
    kernel.launch((x.plan.num_ctas, -(-rows // block_rows), 1), **arguments)
    combine.combine_triton(x, partial_out, partial_lse)


def block_rows_of(path: KernelPath, rows: int) -> int:
    """Query rows of a program: 16, or as many as the path allows where there are more."""
    most: int = path.params.block_rows
    return 16 if rows <= 16 else most


def decode_kernel(
    path: KernelPath, spec: MlaSpec, causal: bool, operand: torch.dtype, block_rows: int
) -> KernelLaunch:
    """The main kernel of a layer, as its path launches it, with ``block_rows`` per program."""
    p = path.params
    causal = causal and spec.query_tokens > 1
    return _kernel(
        spec.page_size,
        p.block_kv,
        block_rows,
        _CACHES[spec.cache_format],
        causal,
        operand,
        spec.variant,
        p.num_warps,
        p.num_stages,
    )


@functools.cache
def _kernel(
    page_size: int,
    block_kv: int,
    block_rows: int,
    cache: int,
    causal: bool,
    operand: torch.dtype,
    variant: Variant,
    num_warps: int,
    num_stages: int,
) -> KernelLaunch:
    import triton.language as tl

    from backend_core.launch.triton import KernelLaunch
    from softmax_backend.kernels.mla_decode import mla_decode_kernel

    types = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }
    logits, mask, key = variant.jit()
    constexprs = {
        "PAGE_SIZE": page_size,
        "BLOCK_KV": block_kv,
        "BLOCK_ROWS": block_rows,
        "CACHE": cache,
        "CAUSAL": causal,
        "OPERAND": types[operand],
        "LOGITS": logits,
        "MASK": mask,
        "KEY": key,
    }
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return KernelLaunch(mla_decode_kernel, constexprs, options)


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """What the products take: x's dtype, or float32 in Triton's interpreter, which multiplies bf16
    by its bits."""
    return x.dtype if x.is_cuda else torch.float32


def is_available(device: torch.device) -> bool:
    """Whether Triton's kernels run on the device: a GPU, or any under Triton's interpreter."""
    return device.type == "cuda" or interprets()
