"""MLA decode in Triton: the main kernel over the work list, then combine."""

from __future__ import annotations

import functools

import torch
import triton.language as tl

from backend_core.contracts import expect_near, interprets
from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from backend_core.target import Target
from mla_backend import combine
from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.decode import Planning, PreparedDecode, ctas_of
from mla_backend.kernels.mla_decode import mla_decode_kernel
from mla_backend.launch_params import TritonMlaParams
from mla_backend.plan.fill import plan_split_kv
from mla_backend.scratch import SplitScratch
from mla_backend.spec import LATENT_DIM, MlaSpec

AXES = {
    **{"q_latent": "..h.", "q_rope": "..h."},
    **{"kv_latent": "pt.", "kv_rope": "pt.", "block_table": "r."},
}
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def bind(row: Row, spec: MlaSpec, target: Target) -> TritonDecode:
    return TritonDecode(row.params, spec)


def plan(row: Row, spec: MlaSpec, num_sms: int, shares: bool) -> Planning:
    blocks = -(-min(spec.query_rows, 64) // row.params.block_rows)
    return Planning(ctas_of(spec, num_sms, shares, blocks), shares, False, plan_split_kv)


class TritonDecode:
    """Two launches: partial outputs or, where a tile has one split, the output; then the merge."""

    def __init__(self, params: TritonMlaParams, spec: MlaSpec) -> None:
        self._params = params
        # a plan with shared prefixes has other tiles, and not every call is causal
        self._kernel = functools.cache(functools.partial(decode_kernel, params, spec))

    def prepare(self, x: MlaInputs) -> PreparedDecode:
        return self._run

    def _run(self, x: MlaInputs, scratch: SplitScratch) -> None:
        (q_latent, q_rope), (kv_latent, kv_rope) = x.q, x.kv
        expect_near("q_latent", q_latent, 2)
        expect_near("q_rope", q_rope, 2)
        prefix = x.plan.prefix
        rows = 64 if prefix is not None else x.spec.query_rows
        partial_out, partial_lse = scratch.reserve(x.plan.num_slots, rows, LATENT_DIM)
        block_rows = block_rows_of(self._params, rows)
        self._kernel(x.causal, block_rows).launch(
            (x.plan.num_ctas, -(-rows // block_rows), 1),
            q_latent_ptr=q_latent,
            q_rope_ptr=q_rope,
            kv_latent_ptr=kv_latent,
            kv_rope_ptr=kv_rope,
            block_table_ptr=x.block_table,
            lengths_ptr=x.plan.lengths,
            work_ptr=x.plan.work,
            num_splits_ptr=x.plan.num_splits,
            tiles_ptr=None if prefix is None else prefix.tiles,
            members_ptr=None if prefix is None else prefix.members,
            sinks_ptr=x.sinks,
            out_ptr=x.out,
            lse_ptr=x.lse,
            partial_out_ptr=partial_out,
            partial_lse_ptr=partial_lse,
            scale=x.scale,
            stride_q_latent_t=x.strides_q_t[0],
            stride_q_rope_t=x.strides_q_t[1],
            partial_rows=rows,
            query_tokens=x.spec.query_tokens,
            heads=x.spec.num_heads,
        )
        combine.combine_triton(x, partial_out, partial_lse)


def block_rows_of(params: TritonMlaParams, rows: int) -> int:
    """Query rows of a program: 16, or as many as the path allows where there are more."""
    return 16 if rows <= 16 else params.block_rows


def decode_kernel(
    params: TritonMlaParams, spec: MlaSpec, causal: bool, block_rows: int
) -> KernelLaunch:
    """The main kernel of a layer, as its path launches it, with ``block_rows`` per program."""
    constexprs = {
        "PAGE_SIZE": spec.page_size,
        "BLOCK_KV": params.block_kv,
        "BLOCK_ROWS": block_rows,
        "CAUSAL": causal and spec.query_tokens > 1,
        # the interpreter multiplies bf16 by its bits
        "OPERAND": tl.float32 if interprets() else _DTYPES[spec.dtype],
    }
    options = {"num_warps": params.num_warps, "num_stages": params.num_stages}
    return KernelLaunch(mla_decode_kernel, constexprs, options, axes=AXES)
