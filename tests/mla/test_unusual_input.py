"""Inputs that are as described, and unlike what an engine hands in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from mla_backend import combine
from mla_backend.api import mla_decode
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.decode import sm90 as mla_sm90
from mla_backend.drop_ins.flashinfer import MultiLevelCascadeAttentionWrapper
from mla_backend.plan import MlaPlanner
from mla_backend.scratch import SplitScratch
from mla_backend.sparse_mla import sparse_mla
from mla_backend.spec import MlaSpec
from mla_backend.testing import sparse_mla_cases as sparse
from mla_backend.testing.cases import (
    SCALE,
    MlaCase,
    assert_close,
    expected,
    forced,
    make_case,
    run_case,
)
from tests.out_of_memory import failing


def run(case: MlaCase, path: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    planner = MlaPlanner(forced(case.spec, path))
    plan = dataclasses.replace(planner.plan(case.lengths), **changes)
    return run_case(case, planner, plan=plan)


def test_more_splits_than_256(path: str, path_device: torch.device, seed: int) -> None:
    """An MI300X has 304 compute units, which one long request of few heads takes all of."""
    if path == "sm90":
        pytest.skip("Hopper has 132 SMs")
    case = make_case(MlaSpec(1, 64), [64 * 304], seed=seed, device=path_device)
    planner = MlaPlanner(forced(case.spec, path, **({} if path == "torch" else {"num_sms": 304})))
    plan = planner.plan(case.lengths)
    assert path == "torch" or int(plan.num_splits[-1]) == 304
    assert_close(run_case(case, planner, plan=plan), expected(case))


@pytest.mark.parametrize("path", ["torch"], indirect=True)  # others merge splits by their LSE
@pytest.mark.parametrize("sink", [None, -math.inf, 0.0, math.inf])
def test_logits_far_from_zero(
    path: str, path_device: torch.device, seed: int, sink: float | None
) -> None:
    """All of a size whose LSE fp32 rounds by more than the logarithm of the number of keys."""
    case = make_case(MlaSpec(2, 64), [70, 130, 5], seed=seed, device=path_device)
    case.q_latent.zero_()[..., 0] = 2.0**15
    case.q_rope.zero_()
    case.kv_latent[..., 0] = 2.0**14
    sinks = None if sink is None else torch.full((2,), sink, device=path_device)
    planner = MlaPlanner(forced(case.spec, path))
    out, _ = run_case(case, planner, sinks=sinks)
    for n, length in enumerate(case.lengths.tolist()):
        pages = case.block_table[n, : -(-length // 64)].long()
        latent = case.kv_latent[pages].flatten(0, 1)[:length, 1:].float()
        want = torch.zeros_like(latent[0]) if sink == math.inf else latent.mean(0)
        torch.testing.assert_close(out[n, 0, :, 1:].float(), want.expand(2, -1), atol=2e-2, rtol=0)


def test_logits_of_sparse_mla_far_from_zero(device: torch.device, seed: int) -> None:
    case = sparse.make_case(2, [(16, 20, None)], seed=seed, device=device)
    numbers = 0.05 * torch.randn(4, 16, 512, generator=torch.Generator().manual_seed(seed))
    numbers[..., -1] = 2.0**14
    rows = torch.arange(20, dtype=torch.int32, device=device).expand(3, 1, -1).contiguous()
    cache = sparse.write_records(numbers).to(device)
    cache = cache.as_strided(cache.shape, (cache.stride(0), 584, 1))
    case.q.zero_()[..., -1] = 2.0**15
    out, _ = sparse_mla(case.q, NamedRows(cache, rows), forced(case.spec, "torch"), scale=SCALE)
    want = numbers.flatten(0, 1)[:20].mean(0)[:-1].to(device)
    torch.testing.assert_close(out[..., :-1].float(), want.expand(3, 1, 2, -1), atol=1e-2, rtol=0)


def test_a_token_dimension_of_one_with_any_stride(
    path: str, path_device: torch.device, seed: int
) -> None:
    """Some of a tensor's heads, then ``unsqueeze``: the stride of the new dimension is theirs."""
    case = make_case(MlaSpec(8, 64), [70, 130, 5], seed=seed, device=path_device)
    wide = torch.full((3, 24, 576), float("nan"), dtype=torch.bfloat16, device=path_device)
    mine = wide[:, 8:16]
    mine.copy_(torch.cat([case.q_latent, case.q_rope], -1)[:, 0])
    q = mine.unsqueeze(1)
    assert q.stride(1) != q.stride(0)
    case.q_latent, case.q_rope = q[..., :512], q[..., 512:]
    assert_close(run(case, path), expected(case))


def test_lengths_with_gaps_are_refused(path: str, path_device: torch.device) -> None:
    case = make_case(MlaSpec(2, 64), [70, 200], device=path_device)
    gaps = case.lengths.repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match="lengths must have stride 1 in dimension 0, got 2"):
        run(case, path, lengths=gaps)


@pytest.mark.parametrize(
    ("page", "width", "message"),
    [
        (None, 3, r"block_table must have 5 pages for the 300 tokens of request 1, got 3"),
        (-1, 5, r"block_table must have pages 0 to \d+ for request 1, got"),
        (10000, 5, r"block_table must have pages 0 to \d+ for request 1, got"),
    ],
)
def test_what_a_cpu_finds_wrong_in_a_table(page: int | None, width: int, message: str) -> None:
    """A GPU's values are trusted; the torch path reads them anyway, before it writes."""
    case = make_case(MlaSpec(2, 64), [70, 300])
    case.block_table = case.block_table[:, :width]
    if page is not None:
        case.block_table[1, 2] = page
    with pytest.raises(ValueError, match=message):
        run(case, "torch")
    assert all(x.isnan().all() for x in case.result)


@pytest.mark.interpreter
def test_heads_far_apart_are_refused() -> None:
    """Triton's kernels count from head to head in int32. The memory is never touched."""
    memory = torch.empty(2**31 + 512, dtype=torch.bfloat16)
    case = make_case(MlaSpec(3, 64), [70])
    case.q_rope = memory.as_strided(case.q_rope.shape, (0, 0, 2**30, 1))
    with pytest.raises(ValueError, match=r"q_rope must span fewer than 2\*\*31 elements"):
        run(case, "triton")
    named = sparse.make_case(3, [(64, 40, [40])], requests=1)
    named.q = memory.as_strided(named.q.shape, (0, 0, 2**30, 1))
    with pytest.raises(ValueError, match=r"q must span fewer than 2\*\*31 elements"):
        sparse.run_case(named, forced(named.spec, "triton"))


@pytest.mark.parametrize("path", ["torch", "triton"], indirect=True)
def test_a_cache_without_pages(path: str, path_device: torch.device, seed: int) -> None:
    """What a second cache is before the first compressed token: its indices name nothing."""
    lists = [(64, 40, [40, 7]), (2, 8, None)]
    case = sparse.make_case(8, lists, requests=2, seed=seed, device=path_device)  # type: ignore[arg-type]
    assert case.extra is not None
    case.extra = NamedRows(case.extra.cache[:0], case.extra.indices)
    case.plain[1] = case.plain[1][:0]
    got = sparse.run_case(case, forced(case.spec, path))
    sparse.assert_close(got, sparse.expected(case))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["q_latent", "q_rope", "out"])
def test_hopper_refuses_rows_that_its_copies_cannot_fetch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address between multiples of 16 bytes would end the process's CUDA context."""
    for module in (mla_sm90, combine):  # no GPU to compile for, and nothing is launched

        def kernel(*args: object) -> Any:
            return lambda *launch, **options: pytest.fail("a kernel was launched")

        monkeypatch.setattr(module, "CudaKernel", kernel)
    monkeypatch.setattr(mla_sm90, "_maps", lambda cache: pytest.fail("the driver was asked"))
    combine._sm90_kernel.cache_clear()
    case = make_case(MlaSpec(2, 64), [70, 200])
    selection = forced(case.spec, "sm90")
    plan = MlaPlanner(forced(case.spec, "triton")).plan(case.lengths)
    tensors = {
        "q_latent": case.q_latent,
        "q_rope": case.q_rope,
        "out": torch.empty(2, 1, 2, 512, dtype=torch.bfloat16),
    }
    x = tensors[name]
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    tensors[name] = odd.copy_(x)
    with pytest.raises(ValueError, match=f"{name} must have rows that start at multiples of 16"):
        mla_decode(
            kv_latent=case.kv_latent,
            kv_rope=case.kv_rope,
            block_table=case.block_table,
            plan=plan,
            selection=selection,
            scale=SCALE,
            scratch=SplitScratch(torch.device("cpu")),
            **tensors,
        )
    combine._sm90_kernel.cache_clear()


def test_a_tensor_map_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is used again with another shape gets a map of its own."""
    made: list[tuple[object, ...]] = []

    def record(*arguments: object) -> tuple[int, ...]:
        made.append(arguments)
        return (len(made),)

    monkeypatch.setattr(mla_sm90, "_tensor_map", record)
    mla_sm90._encode.cache_clear()
    memory = torch.zeros(8 * 64 * 576, dtype=torch.bfloat16)
    large = memory.view(8, 64, 576)[..., :512]
    few, narrow = large[:4], memory.view(16, 32, 576)[..., :512]
    maps = [mla_sm90._maps(cache) for cache in (large, few, narrow, large)]
    mla_sm90._encode.cache_clear()
    assert maps[0] == maps[3] and len(set(maps)) == 3 and len(made) == 6


@pytest.mark.parametrize("path", ["torch"], indirect=True)
def test_autocast_leaves_fp32_products(path: str, path_device: torch.device, seed: int) -> None:
    case = make_case(MlaSpec(2, 64, dtype=torch.float32), [70, 200], seed=seed)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(case, path)
    assert_close(got, expected(case), tolerance=1e-5)


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def cascade(device: torch.device, seed: int) -> torch.Tensor:
    """Two levels of three requests, large logits."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    q = (torch.randn(3, 4, 64, **options) * 4).to(device)
    cache = torch.randn(8, 2, 4, 2, 64, **options).to(device)
    wrapper = MultiLevelCascadeAttentionWrapper(2, q)
    wrapper.plan(
        [indices(0, 3), indices(0, 1, 2, 3)],
        [indices(0, 3), indices(0, 1, 2, 3)],
        [indices(0, 1, 2), indices(3, 4, 5)],
        [indices(4), indices(1, 2, 4)],
        4,
        2,
        64,
        4,
        causal=True,
        q_data_type=torch.float32,
    )
    return wrapper.run(q, cache)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"])
def test_a_cascade_takes_no_default_dtype_or_device(
    device: torch.device, seed: int, default: torch.dtype | str
) -> None:
    want = cascade(device, seed)
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        got = cascade(device, seed)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(got, want)


@pytest.mark.parametrize("number", [0, 1])
def test_scratch_that_cannot_grow_keeps_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = SplitScratch(torch.device("cpu"))
    scratch.reserve(2, 4, 8)
    with failing(monkeypatch, number), pytest.raises(torch.OutOfMemoryError):
        scratch.reserve(20, 4, 8)
    out, lse = scratch.reserve(20, 4, 8)
    assert out.shape == (20, 4, 8) and lse.shape == (20, 4)
    assert scratch.nbytes == 4 * (20 + 2) * 4 * (8 + 1)  # the memory and what it has outgrown


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("is_graph", [False, True])
def test_a_plan_that_runs_out_of_memory_is_none(
    is_graph: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the cascade: neither the plan before nor half of the new one runs."""
    where, i32 = torch.device("cpu"), torch.tensor
    buffers = {
        "use_cuda_graph": True,
        "qo_indptr_buf_arr": [torch.zeros(2, dtype=torch.int32)],
        "paged_kv_indptr_buf_arr": [torch.zeros(2, dtype=torch.int32)],
        "paged_kv_indices_buf_arr": [torch.zeros(8, dtype=torch.int32)],
        "paged_kv_last_page_len_buf_arr": [torch.zeros(1, dtype=torch.int32)],
    }
    wrapper = MultiLevelCascadeAttentionWrapper(
        1, torch.empty(1, device=where), **(buffers if is_graph else {})
    )
    q, cache = torch.randn(4, 2, 64), torch.randn(4, 2, 4, 2, 64)

    def plan(tokens: int, last: int) -> None:
        arrays = ([0, tokens], [0, 1], [1], [last])
        wrapper.plan(
            *([i32(x, dtype=torch.int32)] for x in arrays), 2, 2, 64, 4, q_data_type=torch.float32
        )

    plan(4, 4)
    plan(3, 1)
    want = wrapper.run(q, cache)
    plan(4, 4)
    with failing(monkeypatch, number) as asked:
        try:
            plan(3, 1)
        except torch.OutOfMemoryError:
            assert len(asked) == number + 1
    if len(asked) == number + 1:
        with pytest.raises(ValueError, match="plan must be called before run"):
            wrapper.run(q, cache)
    plan(3, 1)
    assert torch.equal(wrapper.run(q, cache), want)
