"""Calls whose tensors are on another GPU than the current one, and on two GPUs at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from backend_core.operator import Selection
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.drop_ins.sageattention import sageattn, sageattn_varlen
from block_sparse_backend.drop_ins.spargeattn import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
)
from block_sparse_backend.plan import intervals, predicted
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.sage import packed_attention, predicted_attention, quantised_attention
from block_sparse_backend.testing.cases import inputs
from block_sparse_backend.video import VideoAttention
from mla_backend import api
from mla_backend.api import mla_decode
from mla_backend.beside import Beside
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.decode import MlaPath
from mla_backend.drop_ins import flashinfer
from mla_backend.drop_ins.flash_mla import flash_mla_with_kvcache
from mla_backend.engines import mla_decoder
from mla_backend.engines.sparse_layer import LayerShape, SparseLayer
from mla_backend.plan import MlaPlanner
from mla_backend.scratch import SplitScratch
from mla_backend.sparse_mla import SparseMlaSelection, selection_for, sparse_mla
from mla_backend.spec import MlaSpec
from mla_backend.spec_sparse_mla import SparseMlaSpec
from mla_backend.testing import cases, sparse_mla_cases
from tests.current_device import (
    Call,
    Make,
    Results,
    assert_alike,
    check_elsewhere,
    check_on_second_gpu,
    needs_two_gpus,
)

SPEC = MlaSpec(4, 64)
CPU, OTHER = torch.device("cpu"), torch.device("meta")


def i32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def mla_selection(device: torch.device, spec: MlaSpec = SPEC) -> Selection[MlaSpec, MlaPath]:
    """That of the device; on a CPU Triton's, which the interpreter runs."""
    return (
        api.selection_for(device, spec) if device.type == "cuda" else cases.forced(spec, "triton")
    )


def sparse_selection(device: torch.device, spec: SparseMlaSpec) -> SparseMlaSelection:
    is_gpu = device.type == "cuda"
    return selection_for(device, spec) if is_gpu else cases.forced(spec, "triton")


def path_on(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "triton"


def planned(device: torch.device, **options: Any) -> Call:
    case = cases.make_case(SPEC, [200, 0, 130], shared_tokens=64, device=device)
    planner = MlaPlanner(mla_selection(device), **options)

    def call() -> Results:
        plan = planner.plan(case.lengths, case.block_table)
        again = planner.plan(case.lengths, case.block_table, out=plan)
        prefix = () if again.prefix is None else (again.prefix.tiles, again.prefix.tile_lengths)
        return again.work, again.num_splits, *prefix

    return call


def mla(device: torch.device) -> Call:
    case = cases.make_case(SPEC, [200, 0, 130], device=device)
    planner = MlaPlanner(mla_selection(device))
    plan = planner.plan(case.lengths)
    tensors = (case.q_latent, case.q_rope, case.kv_latent, case.kv_rope, case.block_table)
    return lambda: mla_decode(*tensors, plan, planner.selection, scale=cases.SCALE)


def decoder(device: torch.device) -> Call:
    """An engine's decoder: its planning, and a layer's attention."""
    case = cases.make_case(SPEC, [200, 1, 130], device=device)
    served = mla_decoder.MlaDecoder.__new__(mla_decoder.MlaDecoder)
    served.device = device
    served.paths = Beside({1: mla_selection(device)}, {})
    served._most, served._plans, served._scratch = 3, {}, SplitScratch(device)

    def call() -> Results:
        served.warm_up()
        step = served.step(case.lengths, case.block_table, 1)
        q = case.q_latent.flatten(0, 1), case.q_rope.flatten(0, 1)
        return step.attend(*q, case.kv_latent, case.kv_rope, cases.SCALE)

    return call


def sparse_case(device: torch.device) -> sparse_mla_cases.SparseCase:
    lists = [(4, 20, [20, 3, 0]), (2, 70, None)]
    return sparse_mla_cases.make_case(4, lists, has_sinks=True, device=device)


def sparse(device: torch.device) -> Call:
    case = sparse_case(device)
    options: dict[str, Any] = {"extra": case.extra, "sinks": case.sinks}
    selection = sparse_selection(device, case.spec)
    return lambda: sparse_mla(case.q, case.rows, selection, scale=0.1, **options)


def sparse_layer(device: torch.device) -> Call:
    case = sparse_case(device)
    assert case.extra is not None and case.sinks is not None
    form = LayerShape(4, case.spec.page_size, case.spec.extra_page_size, (20, 70), 3)
    served = SparseLayer.__new__(SparseLayer)
    served.form, served._scratch = form, SplitScratch(device)
    served.paths = Beside({"decode": sparse_selection(device, case.spec)}, {})
    q, extra, sinks = case.q, case.extra, case.sinks
    return lambda: (served.decode(q, case.rows, extra, scale=0.1, sinks=sinks, out=None),)


def flash_mla(device: torch.device) -> Call:
    case = sparse_case(device)
    assert case.extra is not None
    cache, extra = case.rows.cache.unsqueeze(2), case.extra.cache.unsqueeze(2)
    return lambda: flash_mla_with_kvcache(
        case.q, cache, None, None, 512, is_fp8_kvcache=True, indices=case.rows.indices,
        topk_length=case.rows.lengths, extra_k_cache=extra,
        extra_indices_in_kvcache=case.extra.indices,
    )  # fmt: skip


def tokens(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs((4, 150, 64), (2, 150, 64), seed=3, device=device)


def causal_plan(device: torch.device) -> BlockPlan:
    return intervals.causal(150, 150, 4, block_m=64, block_n=64, device=device)


def block_sparse(device: torch.device) -> Call:
    q, k, v = tokens(device)
    plan, path = causal_plan(device), path_on(device)
    return lambda: block_sparse_attention(q, k, v, plan, path=path)


def quantised(device: torch.device) -> Call:
    q, k, v = tokens(device)
    plan, path = causal_plan(device), path_on(device)
    return lambda: quantised_attention(q, k, v, plan, path=path)


def of_predicted_blocks(device: torch.device) -> Call:
    q, k, v = tokens(device)
    choice, path = Choice(topk=0.5, min_likeness=0.1), path_on(device)
    return lambda: predicted_attention(q, k, v, choice, blocks=(64, 64), path=path)[:2]


def prediction(device: torch.device) -> Call:
    q, k, _ = tokens(device)

    def call() -> Results:
        plan = predicted.predict(q, k, topk=0.5, min_likeness=0.1, path=path_on(device))
        return plan.rows, plan.work

    return call


def recall(device: torch.device) -> Call:
    q, k, _ = tokens(device)
    plan = causal_plan(device)
    return lambda: (predicted.recall(plan, q, k),)


def drop_in(function: Callable[..., Any], device: torch.device) -> Call:
    q, k, v = tokens(device)
    return lambda: (function(q, k, v),)


def block_map(device: torch.device) -> Call:
    q, k, v = tokens(device)
    kept = torch.ones(1, 4, 2, 3, dtype=torch.bool, device=device)
    return lambda: (block_sparse_sage2_attn_cuda(q, k, v, kept),)


def video(device: torch.device, **settings: Any) -> Call:
    q, k, v = (x.transpose(1, 2) for x in inputs((2, 110, 64), (2, 110, 64), seed=4, device=device))
    attention = VideoAttention(**settings)
    return lambda: (attention(q, k, v),)


def cascade(device: torch.device) -> Call:
    generator = torch.Generator().manual_seed(7)
    cache = torch.randn(8, 2, 4, 2, 64, generator=generator).bfloat16().to(device)
    q = torch.randn(3, 4, 64, generator=generator).bfloat16().to(device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1, device=device))

    def call() -> Results:
        wrapper.plan(
            [i32([0, 3], device), i32([0, 1, 3], device)],
            [i32([0, 2], device), i32([0, 1, 3], device)],
            [i32([3, 5], device), i32([0, 1, 2], device)],
            [i32([4], device), i32([2, 3], device)],
            4, 2, 64, 4, causal=True, q_data_type=torch.bfloat16,
        )  # fmt: skip
        return (wrapper.run(q, cache),)

    return call


def varlen(device: torch.device) -> Call:
    q, k, v = (x[0].transpose(0, 1) for x in tokens(device))
    ends = i32([0, 40, 150], device)
    return lambda: (sageattn_varlen(q, k, v, ends, ends, 110, 110),)


def of_packed_sequences(device: torch.device) -> Call:
    q, k, v = tokens(device)
    ends, path = i32([0, 40, 150], device), path_on(device)
    return lambda: (packed_attention(q, k, v, ends, ends, (110, 110), path=path),)


KERNELS: dict[str, Make] = {
    "plan": planned,
    "plan, shared prefixes": lambda device: planned(device, shared_prefix_tokens=64),
    "mla_decode": mla,
    "MlaDecoder": decoder,
    "sparse_mla": sparse,
    "SparseLayer": sparse_layer,
    "block_sparse_attention": block_sparse,
    "quantised_attention": quantised,
    "predicted_attention": of_predicted_blocks,
    "predict": prediction,
    "packed_attention": of_packed_sequences,
    "MultiLevelCascadeAttentionWrapper": cascade,
}
"""What launches kernels in the interpreter too."""

OTHERS: dict[str, Make] = {
    "flash_mla": flash_mla,
    "recall": recall,
    "sageattn": lambda device: drop_in(sageattn, device),
    "sageattn_varlen": varlen,
    "spas_sage2_attn_meansim_cuda": lambda device: drop_in(spas_sage2_attn_meansim_cuda, device),
    "spas_sage2_attn_meansim_topk_cuda": lambda device: drop_in(
        spas_sage2_attn_meansim_topk_cuda, device
    ),
    "block_sparse_sage2_attn_cuda": block_map,
    "VideoAttention, dense": lambda device: video(device, eight_bit=False),
    "VideoAttention, predicted": lambda device: video(device, kind="predicted"),
    "VideoAttention, 16-bit, predicted": lambda device: video(
        device, kind="predicted", eight_bit=False
    ),
    "VideoAttention, tiles": lambda device: video(
        device, kind="sliding_tile", canvas=(4, 5, 5), tile=(2, 5, 5), windows=((1, 1, 1),)
    ),
}
"""What reaches the operators through their public functions, on a CPU their paths in torch."""

CALLS = KERNELS | OTHERS


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_another_device_than_the_current_one_runs_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = check_elsewhere(CALLS[name], monkeypatch)
    assert seen.entered and set(seen.entered) == {CPU}
    assert set(seen.launched) <= {CPU}
    assert seen.launched or name in OTHERS


@needs_two_gpus
@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_the_gpu_of_its_tensors(name: str) -> None:
    check_on_second_gpu(CALLS[name])


def away(x: torch.Tensor) -> torch.Tensor:
    """The same on another device."""
    return x.to(OTHER)


def refused(name: str) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """A call with one tensor on another device, and what it must not write."""
    if name.startswith("plan"):
        case = cases.make_case(SPEC, [200, 130], shared_tokens=64)
        planner = MlaPlanner(mla_selection(CPU), shared_prefix_tokens=64)
        plan = planner.plan(case.lengths, case.block_table)
        table, out = case.block_table, plan
        if name == "plan block_table":
            table = away(table)
        else:
            out = replace(plan, work=away(plan.work))
        return lambda: planner.plan(case.lengths, table, out=out), (plan.num_splits,)
    if name == "mla_decode scratch":
        case = cases.make_case(SPEC, [200, 130])
        planner = MlaPlanner(mla_selection(CPU))
        plan, out = planner.plan(case.lengths), torch.zeros(2, 1, 4, 512, dtype=torch.bfloat16)
        tensors = (case.q_latent, case.q_rope, case.kv_latent, case.kv_rope, case.block_table)
        options: dict[str, Any] = {"scale": 0.1, "out": out, "scratch": SplitScratch(OTHER)}
        return lambda: mla_decode(*tensors, plan, planner.selection, **options), (out,)
    if name.startswith("sparse_mla"):
        sparse = sparse_case(CPU)
        out, rows, scratch = torch.zeros_like(sparse.q), sparse.rows, None
        if name == "sparse_mla scratch":
            scratch = SplitScratch(OTHER)
        else:
            rows = NamedRows(rows.cache, away(rows.indices), rows.lengths)
        selection = sparse_selection(CPU, sparse.spec)
        options = {"scale": 0.1, "extra": sparse.extra, "out": out, "scratch": scratch}
        return lambda: sparse_mla(sparse.q, rows, selection, **options), (out,)
    q, k, v = tokens(CPU)
    out = torch.zeros_like(q)
    plan_of_blocks = causal_plan(CPU)
    choice = Choice(topk=0.5)
    attend: dict[str, Call] = {
        "block_sparse_attention": lambda: block_sparse_attention(
            q, away(k), v, plan_of_blocks, out=out, path="triton"
        ),
        "quantised_attention": lambda: quantised_attention(
            q, k, away(v), plan_of_blocks, out=out, path="triton"
        ),
        "predicted_attention": lambda: predicted_attention(  # type: ignore[dict-item]
            q, away(k), v, choice, out=out, path="triton"
        ),
        "predict": lambda: predicted.predict(q, away(k), topk=0.5),  # type: ignore[dict-item]
        "a block plan": lambda: replace(  # type: ignore[dict-item]
            plan_of_blocks, cols=away(plan_of_blocks.cols)
        ),
        "sageattn": lambda: sageattn(q, k, away(v)),  # type: ignore[dict-item]
        "block_sparse_sage2_attn_cuda": lambda: block_sparse_sage2_attn_cuda(  # type: ignore[dict-item]
            q, k, v, torch.ones(1, 4, 2, 3, dtype=torch.bool, device=OTHER)
        ),
        "ragged": lambda: intervals.ragged(  # type: ignore[dict-item]
            i32([0, 4], CPU), i32([0, 4], OTHER), 4, 4, 1
        ),
    }
    return attend[name], (out,)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan block_table", "block_table must be on cpu, got meta"),
        ("plan out", "out must be on cpu, got meta"),
        ("mla_decode scratch", "scratch must be on cpu, got meta"),
        ("sparse_mla scratch", "scratch must be on cpu, got meta"),
        ("sparse_mla indices", "rows.indices must be on cpu, got meta"),
        ("block_sparse_attention", "k must be on cpu, got meta"),
        ("quantised_attention", "v must be on cpu, got meta"),
        ("predicted_attention", "k must be on cpu, got meta"),
        ("predict", "k must be on cpu, got meta"),
        ("a block plan", "cols must be on cpu, got meta"),
        ("sageattn", "v must be on cpu, got meta"),
        ("block_sparse_sage2_attn_cuda", "mask_id must be on cpu, got meta"),
        ("ragged", "cu_seqlens_k must be on cpu, got meta"),
    ],
)
def test_tensors_on_two_devices_are_refused(name: str, message: str) -> None:
    call, untouched = refused(name)
    before = [x.clone() for x in untouched]
    with pytest.raises(ValueError, match=message):
        call()
    assert_alike(untouched, tuple(before))


def test_video_attention_refuses_tensors_on_another_device() -> None:
    """On two GPUs where there are: torch orders tokens of ``meta`` by an index of the CPU."""
    here, there = CPU, OTHER
    if torch.cuda.device_count() > 1:
        here, there = (torch.device("cuda", n) for n in range(2))
    q = torch.zeros(1, 110, 2, 64, dtype=torch.bfloat16, device=here)
    tiles = VideoAttention("sliding_tile", canvas=(4, 5, 5), tile=(2, 5, 5), windows=((1, 1, 1),))
    for attention in (tiles, VideoAttention()):
        with pytest.raises(ValueError, match=f"k must be on {here}, got {there}"):
            attention(q, q.to(there), q)
        with pytest.raises(ValueError, match=f"v must be on {here}, got {there}"):
            attention(q, q, q.to(there))
