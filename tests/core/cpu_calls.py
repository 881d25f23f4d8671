"""Calls of the operators and planners that ask for a GPU's kernels and bring CPU tensors.

    python -m tests.core.cpu_calls

It prints a JSON object: of each call what it raised, or that it returned, and whether its outputs
are as they were. In a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

import dsv4_backend as dsv4
from backend_core.target import KNOWN_TARGETS
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.plan.predicted import predict
from block_sparse_backend.sage import predicted_attention, quantised_attention
from block_sparse_backend.testing.cases import inputs
from dsv4_backend.testing import engine as dsv4_engine
from kda_backend import (
    StateRef,
    build_step_plan,
    kda_decode_step,
    kda_prefill,
    kda_recurrent,
)
from kda_backend.selection import select
from kda_backend.testing.cases import make_case
from kda_backend.testing.steps import StepPools, make_step
from mla_backend.api import mla_decode
from mla_backend.plan import MlaPlanner
from mla_backend.spec import MlaSpec
from mla_backend.testing import cases as mla
from mla_backend.testing import sparse_mla_cases as sparse

CPU = torch.device("cpu")
H200 = KNOWN_TARGETS["H200"]
Outputs = tuple[torch.Tensor, ...]
Call = Callable[[Outputs], object]
MARK = 7.0
"""What outputs hold before a call."""


def marked(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, MARK, dtype=dtype, device=CPU)


def kda_calls() -> dict[str, tuple[Call, Outputs]]:
    offsets = torch.tensor([0, 70], dtype=torch.int32, device=CPU)
    case = make_case(0, (70,), heads=2)
    step = make_step(0, 2, device=CPU, heads=2)
    pools = StepPools(step, 2)
    indices = torch.tensor([0, 1], dtype=torch.int32)

    def decode(outputs: Outputs) -> object:
        state = StateRef.pool(pools.states, indices)
        options = step.stages(pools.windows) | {"selection": select(H200, step.shape)}
        return kda_decode_step(*step.inputs, state, out=outputs[0], **options)

    state = StateRef.functional(None, v_first=True)
    selection = select(H200, case.shape)
    return {
        "build_step_plan": (lambda _: build_step_plan(offsets, 70), ()),
        "kda_prefill": (
            lambda outputs: kda_prefill(*case.inputs, state, out=outputs[0], selection=selection),
            (marked(*case.v.shape, dtype=case.v.dtype),),
        ),
        "kda_recurrent": (
            lambda outputs: kda_recurrent(*case.inputs, state, out=outputs[0], selection=selection),
            (marked(*case.v.shape, dtype=case.v.dtype),),
        ),
        "kda_decode_step": (decode, (marked(*step.qkv[2].shape, dtype=step.qkv[2].dtype),)),
    }


def mla_calls() -> dict[str, tuple[Call, Outputs]]:
    case = mla.make_case(MlaSpec(4, 64), [100, 130], shared_tokens=64)
    here = MlaPlanner(mla.forced(case.spec, "torch")).plan(case.lengths)

    def plan(path: str, **options: Any) -> tuple[Call, Outputs]:
        planner = MlaPlanner(mla.forced(case.spec, path), **options)
        return lambda _: planner.plan(case.lengths, case.block_table), ()

    def attend(path: str) -> tuple[Call, Outputs]:
        def call(outputs: Outputs) -> object:
            return mla_decode(
                case.q_latent,
                case.q_rope,
                case.kv_latent,
                case.kv_rope,
                case.block_table,
                here,
                mla.forced(case.spec, path),
                scale=mla.SCALE,
                out=outputs[0],
                lse=outputs[1],
            )

        rows = case.q_latent.shape[:3]
        return call, (marked(*rows, 512, dtype=torch.bfloat16), marked(*rows))

    rows = sparse.make_case(8, [(64, 40, None)])
    return {
        "MlaPlanner.plan": plan("triton"),
        "MlaPlanner.plan, shared prefixes": plan("triton", shared_prefix_tokens=64),
        "MlaPlanner.plan, sm90": plan("sm90"),
        "mla_decode": attend("triton"),
        "mla_decode, sm90": attend("sm90"),
        "sparse_mla": (lambda _: sparse.run_case(rows, mla.forced(rows.spec, "triton")), ()),
        "sparse_mla, gluon": (
            lambda _: sparse.run_case(rows, mla.forced(rows.spec, "gluon_sm90")),
            (),
        ),
    }


def prefill_calls() -> dict[str, tuple[Call, Outputs]]:
    q, k, v = (x.half() for x in inputs((4, 128, 64), (2, 128, 64), seed=0, device=CPU))
    plan = intervals.causal(128, 128, 4, device=CPU)
    out = (marked(*q.shape, dtype=q.dtype),)
    choice = Choice(topk=0.5)
    return {
        "block_sparse_attention": (
            lambda o: block_sparse_attention(q, k, v, plan, path="triton", out=o[0]),
            out,
        ),
        "quantised_attention": (
            lambda o: quantised_attention(q, k, v, plan, path="triton", out=o[0]),
            out,
        ),
        "predicted_attention": (
            lambda o: predicted_attention(q, k, v, choice, path="triton", out=o[0]),
            out,
        ),
        "predict": (lambda _: predict(q, k, topk=0.5, path="triton"), ()),
    }


def compressor_calls() -> dict[str, tuple[Call, Outputs]]:
    spec = dsv4_engine.make_spec("indexer_fp8")
    layer = dsv4_engine.make_layer(spec, device=CPU)
    engine = dsv4_engine.CompressorEngine("ring", spec, [8], device=CPU)
    row = dsv4_engine.make_history(spec, 4, 0, device=CPU)
    memory = (row, engine.state, engine.cache)
    call = dsv4.CompressorCall(layer, *memory)
    decode, prefill = engine.decode_plan([(0, 8)]), engine.prefill_plan([(0, 0, 4)])
    ends = dsv4.SeqLens(torch.tensor([4, 8], device=CPU))
    in_place = {"head_dim": 128, "compress_ratio": 4, "rotate": True, "target": H200}
    return {
        "compress_decode_": (
            lambda _: dsv4.compress_decode_(layer, *memory, decode, target=H200),
            (),
        ),
        "compress_prefill_": (
            lambda _: dsv4.compress_prefill_(layer, *memory, prefill, target=H200),
            (),
        ),
        "warm_up": (
            lambda _: dsv4.warm_up(call, decode, target=H200),
            (),
        ),
        "compress_norm_rope_hadamard_": (
            lambda o: dsv4.compress_norm_rope_hadamard_(
                o[0],
                layer.norm_weight,
                1e-6,
                layer.rope_table,
                ends,
                **in_place,  # type: ignore[arg-type]
            ),
            (marked(2, 128),),
        ),
    }


def main() -> None:
    calls = kda_calls() | mla_calls() | prefill_calls() | compressor_calls()
    found = {}
    for name, (call, outputs) in calls.items():
        try:
            call(outputs)
            raised = "nothing"
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        found[name] = [raised, all(bool((x == MARK).all()) for x in outputs)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
