"""MLA decode on every path against float64: caches, pages, lengths, drafts, sinks."""

from __future__ import annotations

import pytest
import torch

from mla_backend.plan import MlaPlanner
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import assert_close, expected, forced, make_case, run_case

LENGTHS = [1, 63, 0, 65, 300, 128]


def supported(path: str, spec: MlaSpec) -> None:
    if path == "sm90" and spec.requires():
        pytest.skip("the table does not choose sm90 for this layer")


def check(path: str, device: torch.device, spec: MlaSpec, lengths: list[int], seed: int,
          **options: int) -> None:  # fmt: skip
    supported(path, spec)
    case = make_case(spec, lengths, seed=seed, device=device)
    planner = MlaPlanner(forced(spec, path), **options)  # type: ignore[arg-type]
    assert_close(run_case(case, planner), expected(case))


@pytest.mark.parametrize("page_size", [1, 16, 64, 240, 1888])
def test_any_page_size(path: str, path_device: torch.device, page_size: int, seed: int) -> None:
    check(path, path_device, MlaSpec(4, page_size), LENGTHS, seed)


@pytest.mark.parametrize("heads", [1, 8, 20, 32])
def test_any_number_of_heads(path: str, path_device: torch.device, heads: int, seed: int) -> None:
    check(path, path_device, MlaSpec(heads, 64), [70, 0, 200], seed)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8])
def test_drafts_are_causal(path: str, path_device: torch.device, tokens: int, seed: int) -> None:
    """Requests shorter than the draft, too: the first query tokens then see nothing."""
    check(path, path_device, MlaSpec(4, 16, query_tokens=tokens), [tokens - 1, 64, 130], seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(path: str, path_device: torch.device, dtype: torch.dtype, seed: int) -> None:
    check(path, path_device, MlaSpec(4, 64, dtype=dtype), [100, 0, 70], seed)


@pytest.mark.parametrize("lengths", [[1000], [0], [0, 0, 0], [64] * 7, [1] * 9])
def test_shapes_of_a_batch(
    path: str, path_device: torch.device, lengths: list[int], seed: int
) -> None:
    check(path, path_device, MlaSpec(4, 64), lengths, seed)


@pytest.mark.parametrize("sink", [0.5, float("-inf"), float("inf")])
def test_sinks_weigh_and_leave_the_lse(
    path: str, path_device: torch.device, sink: float, seed: int
) -> None:
    """In a tile with one split, in one with several, and without keys."""
    spec = MlaSpec(4, 64)
    case = make_case(spec, [500, 10, 0], seed=seed, device=path_device)
    sinks = torch.tensor([sink, 1.0, -2.0, 3.0], device=path_device)
    got = run_case(case, MlaPlanner(forced(spec, path)), sinks=sinks)
    assert_close(got, expected(case, sinks=sinks))
    assert torch.allclose(got[1][:2].double(), expected(case)[1][:2], atol=2e-3)


def test_not_causal_sees_the_whole_draft(path: str, path_device: torch.device, seed: int) -> None:
    spec = MlaSpec(4, 64, query_tokens=3)
    case = make_case(spec, [100, 3], seed=seed, device=path_device)
    planner = MlaPlanner(forced(spec, path))
    assert_close(run_case(case, planner, causal=False), expected(case, causal=False))


@pytest.mark.parametrize("heads", [16, 17])  # alone a request needs one program's rows, or two
def test_two_levels_give_what_one_gives(
    heads: int, path: str, path_device: torch.device, seed: int
) -> None:
    """Shared prefixes found from the block table; one request is short, one shares nothing."""
    spec = MlaSpec(heads, 16)  # the rows of four requests are one tile of 64, or two
    lengths = [200, 133, 250, 64, 201, 150]
    case = make_case(spec, lengths, seed=seed, shared_tokens=128, device=path_device)
    case.block_table[5, : 150 // 16] = case.block_table[5, : 150 // 16].flip(0)
    selection = forced(spec, path)
    planner = MlaPlanner(selection, shared_prefix_tokens=64)
    plan = planner.plan(case.lengths, case.block_table)
    if path == "torch":  # which computes requests one by one
        assert plan.prefix is None
    else:
        assert plan.prefix is not None
        first = plan.prefix.prefix_tile[0].item()
        assert plan.prefix.prefix_tile.tolist() == [first, first, first, -1, first, -1]
        assert first >= 0
        assert plan.prefix.tiles[0, 3].item() == 128  # without the prefix: a request's own tile
    got = run_case(case, planner, plan=plan)
    assert_close(got, expected(case))
    torch.testing.assert_close(
        got[0], run_case(case, MlaPlanner(selection))[0], atol=4e-3, rtol=2e-2
    )


def test_a_plan_serves_other_lengths_in_place(
    path: str, path_device: torch.device, seed: int
) -> None:
    """The tensors of a plan are written again, as a CUDA graph needs it."""
    spec = MlaSpec(4, 64)
    first = make_case(spec, [300, 64, 1], seed=seed, device=path_device)
    planner = MlaPlanner(forced(spec, path))
    plan = planner.plan(first.lengths)
    addresses = (plan.work.data_ptr(), plan.num_splits.data_ptr())
    second = make_case(spec, [0, 900, 65], seed=seed + 1, device=path_device)
    first.lengths.copy_(second.lengths)
    again = planner.plan(first.lengths, out=plan)
    assert (again.work.data_ptr(), again.num_splits.data_ptr()) == addresses
    assert_close(run_case(second, planner, plan=again), expected(second))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_graph_serves_any_lengths(path: str, path_device: torch.device, seed: int) -> None:
    if path == "torch":
        pytest.skip("the torch path reads lengths on the host")
    spec = MlaSpec(8, 64)
    case = make_case(spec, [4000, 64, 1, 700], seed=seed, device=path_device)
    planner = MlaPlanner(forced(spec, path, num_sms=132))
    run_case(case, planner)
    plan = planner.plan(case.lengths)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            planner.plan(case.lengths, out=plan)
            got = run_case(case, planner, plan=plan)
    torch.cuda.current_stream().wait_stream(stream)
    for lengths in ([4000, 64, 1, 700], [1, 0, 1, 5], [3000, 2, 1, 699]):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(got, expected(case))
