"""The drop-ins: FlashMLA's decode, FlashInfer's wrapper; results, identities and refusals."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from mla_backend import reference
from mla_backend.drop_ins import flashinfer
from mla_backend.drop_ins.flash_mla import flash_mla_with_kvcache
from mla_backend.drop_ins.flashinfer.merge import merge_states
from tests.engines.kda.sglang.device_graph import DeviceGraph


def i32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def where() -> torch.device:
    """Where Triton's kernels run: on the GPU, or in the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def test_positions_of_arguments_are_flash_mlas() -> None:
    """Those of January 2026, which has the arguments of 2025 before its own."""
    names = (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits"
        " softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache"
        " extra_indices_in_kvcache topk_length extra_topk_length"
    )
    found = list(inspect.signature(flash_mla_with_kvcache).parameters)
    assert " ".join(found).startswith(names)


def test_flash_mla_takes_a_scale_that_is_a_tensor_and_names_lists() -> None:
    q = torch.randn(1, 1, 4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache, indices = torch.zeros(2, 64, 1, 584, dtype=torch.uint8), i32([3, 70], q.device)
    options: dict[str, Any] = {"is_fp8_kvcache": True, "indices": indices[None, None]}
    for scale in (torch.tensor(0.1), 0.1, torch.tensor(0.1)):  # the second failed
        flash_mla_with_kvcache(q, cache, None, None, 512, softmax_scale=scale, **options)  # type: ignore[arg-type]
    for name in ("attn_sink", "topk_length", "out"):
        with pytest.raises(ValueError, match=rf"{name} must be a torch.Tensor, got list"):
            flash_mla_with_kvcache(q, cache, None, None, 512, **options, **{name: [1]})


def test_merge_states_is_attention_over_the_union(where: torch.device, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 48, generator=generator) for n in (6, 90, 90))
    parts = [slice(0, 30), slice(30, 31), slice(31, 90)]
    states = [reference.attention(q, k[part], v[part], 0.3) for part in parts]
    values = torch.stack([out.float() for out, _ in states], 1)[:, :, None].to(where)
    lses = torch.stack([lse / math.log(2) for _, lse in states], 1)[:, :, None].float().to(where)
    empty = torch.full_like(values[:, :1], math.nan)  # a state without keys may hold anything
    values = torch.cat([values, empty], 1)
    lses = torch.cat([lses, torch.full_like(lses[:, :1], -math.inf)], 1)
    out = merge_states(values, lses)
    want, _ = reference.attention(q, k, v, 0.3)
    torch.testing.assert_close(out[:, 0].double().cpu(), want, atol=1e-5, rtol=1e-4)
    assert (merge_states(values[:, 3:].contiguous(), lses[:, 3:].contiguous()) == 0).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_cascade_of_two_levels_is_one_level(
    where: torch.device, layout: str, causal: bool, seed: int
) -> None:
    """A shared prefix and the requests' own pages, against one level with all pages."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim, size = 6, 2, 64, 4
    cache = torch.randn(16, 2, size, kv_heads, dim, generator=generator)
    cache[15] = math.nan  # no request's
    cache = cache.bfloat16().to(where)
    shared, own, last = [3, 9, 1], [[4, 5], [6], [7, 8, 10]], [1, 4, 3]
    counts = [1, 3, 2]
    offsets = [0, 1, 4, 6]
    q = torch.randn(6, heads, dim, generator=generator).bfloat16().to(where)
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    options: dict[str, Any] = {"causal": causal, "q_data_type": torch.bfloat16, "sm_scale": 0.2}
    two = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1, device=where), layout)
    two.plan(
        [i32([0, 6], where), i32(offsets, where)],
        [i32([0, 3], where), i32([0, 2, 3, 6], where)],
        [i32(shared, where), i32([page for pages in own for page in pages], where)],
        [i32([size], where), i32(last, where)],
        heads, kv_heads, dim, size, **options,
    )  # fmt: skip
    got = two.run(q, cache)
    flat = [shared + pages for pages in own]
    indptr = [0, *torch.tensor([len(pages) for pages in flat]).cumsum(0).tolist()]
    one = flashinfer.MultiLevelCascadeAttentionWrapper(1, torch.empty(1, device=where), layout)
    one.plan(
        [i32(offsets, where)],
        [i32(indptr, where)],
        [i32([page for pages in flat for page in pages], where)],
        [i32(last, where)],
        heads, kv_heads, dim, size, **options,
    )  # fmt: skip
    torch.testing.assert_close(got.float(), one.run(q, cache).float(), atol=2e-2, rtol=2e-2)
    plain = cache if layout == "NHD" else cache.transpose(2, 3)
    for i, pages in enumerate(flat):
        length = (len(pages) - 1) * size + last[i]
        keys = plain[pages, 0].flatten(0, 1)[:length]
        values = plain[pages, 1].flatten(0, 1)[:length]
        query = length - counts[i] + torch.arange(counts[i], device=where)[:, None]
        position = torch.arange(length, device=where)[None]
        seen = (position <= query) if causal else (position >= 0).expand(counts[i], length)
        for head in (0, 5):
            want, _ = reference.attention(
                q[offsets[i] : offsets[i + 1], head], keys[:, head // 3], values[:, head // 3],
                0.2, seen=seen,
            )  # fmt: skip
            out = got[offsets[i] : offsets[i + 1], head].double()
            torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)


PAGE = 4
CASCADE: dict[str, Any] = {"causal": True, "q_data_type": torch.bfloat16, "sm_scale": 0.2}


def cascade_buffers(where: torch.device) -> dict[str, Any]:
    """For two levels of one and of three groups, with room for pages, whose rest is poison."""
    poison = 2147480000

    def buffers(*lengths: int) -> list[torch.Tensor]:
        return [torch.full((n,), poison, dtype=torch.int32, device=where) for n in lengths]

    return {
        "use_cuda_graph": True,
        "qo_indptr_buf_arr": buffers(2, 4),
        "paged_kv_indptr_buf_arr": buffers(2, 4),
        "paged_kv_indices_buf_arr": buffers(8, 12),
        "paged_kv_last_page_len_buf_arr": buffers(1, 3),
    }


def cascade_step(
    counts: list[int], shared: int, own: list[int], last: list[int], seed: int
) -> list[list[list[int]]]:
    """The arrays of a plan: pages that are shared, then each request's own, drawn."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(15, generator=generator).tolist()
    offsets = [0, *torch.tensor(counts).cumsum(0).tolist()]
    indptr = [0, *torch.tensor(own).cumsum(0).tolist()]
    return [
        [[0, offsets[-1]], offsets],
        [[0, shared], indptr],
        [pages[:shared], pages[shared : shared + indptr[-1]]],
        [[PAGE], last],
    ]


STEPS = [
    cascade_step([35, 3, 2], 2, [9, 1, 2], [3, 4, 1], 1),  # two tiles of 32 query tokens, then one
    cascade_step([1, 1, 1], 5, [4, 2, 3], [1, 4, 2], 2),
    cascade_step([0, 34, 3], 0, [1, 9, 2], [2, 4, 4], 3),
]


def test_a_captured_cascade_serves_the_last_plan(where: torch.device, seed: int) -> None:
    """Planned again, ``run`` launches what it launched before, on the same memory."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim = 2, 1, 32
    cache = torch.randn(16, 2, PAGE, kv_heads, dim, generator=generator).bfloat16()
    cache[15] = math.nan  # no request's
    cache = cache.to(where)
    q = torch.randn(40, heads, dim, generator=generator).bfloat16().to(where)

    def plan(wrapper: Any, step: list[list[list[int]]]) -> None:
        arrays = [[i32(level, where) for level in array] for array in step]
        wrapper.plan(*arrays, heads, kv_heads, dim, PAGE, **CASCADE)

    workspace = torch.empty(1, device=where)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, **cascade_buffers(where))
    assert wrapper.is_cuda_graph_enabled
    graph, got = DeviceGraph(), torch.empty_like(q)
    for number, step in enumerate(STEPS):
        plan(wrapper, step)
        if number == 0:
            got = graph.record(lambda: wrapper.run(q, cache))
        else:
            graph.replay()
        fresh = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace)
        plan(fresh, step)
        tokens = step[0][1][-1]
        want = fresh.run(q[:tokens], cache)
        torch.testing.assert_close(got[:tokens], want, atol=1e-2, rtol=1e-2)
        assert not want.isnan().any() and (got[tokens:] == 0).all()
    levels = wrapper._levels
    plan(wrapper, STEPS[0])
    for before, after in zip(levels, wrapper._levels, strict=True):
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"):
            assert getattr(before, name) is getattr(after, name)
        assert before.tile_start is after.tile_start and before.tile_request is after.tile_request


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (cascade_step([1, 1], 1, [1, 1], [1, 1], 1), {}, "level 1 must have 3 groups, got 2"),
        (
            cascade_step([1, 1, 1], 9, [1, 1, 1], [1, 1, 1], 1),
            {},
            "level 0 must have at most 8 pages, got 9",
        ),
        (
            cascade_step([39, 1, 1], 1, [1, 1, 1], [1, 1, 1], 1),
            {},
            "level 0 must have at most the 40 query tokens of the first plan, got 41",
        ),
        (STEPS[1], {"sm_scale": 0.3}, "every plan must have the settings of the first"),
        (
            [[[0, 4], [0, 1, 2, 3]], *STEPS[1][1:]],
            {},
            r"every level must have as many query tokens, got \[4, 3\]",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_leaves_the_last(
    step: list[list[list[int]]], options: dict[str, Any], message: str
) -> None:
    cpu = torch.device("cpu")
    buffers = cascade_buffers(cpu)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1), **buffers)

    def plan(step: list[list[list[int]]], **changes: Any) -> None:
        arrays = [[i32(level, cpu) for level in array] for array in step]
        wrapper.plan(*arrays, 4, 2, 32, PAGE, **{**CASCADE, **changes})

    plan(STEPS[0])
    kept = [t.clone() for array in list(buffers.values())[1:] for t in array]
    with pytest.raises(ValueError, match=message) as error:
        plan(step, **options)
    assert "\n" not in str(error.value)
    now = [t for array in list(buffers.values())[1:] for t in array]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"paged_kv_indices_buf_arr": None},
            r"use_cuda_graph needs 2 of each of the four buffers .*, got \[2, 2, None, 2\]",
        ),
        ({"use_cuda_graph": False}, "the buffers must be None without use_cuda_graph"),
        (
            {"qo_indptr_buf_arr": [torch.zeros(3, dtype=torch.int32)] * 2},
            r"qo_indptr_buf_arr\[0\] must have shape \[2\], got \[3\]",
        ),
        (
            {"paged_kv_indices_buf_arr": [torch.zeros(9)] * 2},
            r"paged_kv_indices_buf_arr\[0\] must have dtype int32, got float32",
        ),
        (
            {"paged_kv_last_page_len_buf_arr": [[0], [0, 0, 0]]},
            r"paged_kv_last_page_len_buf_arr\[0\] must be a torch.Tensor, got list",
        ),
        (
            {"paged_kv_last_page_len_buf_arr": torch.zeros(2, dtype=torch.int32)},
            r"paged_kv_last_page_len_buf_arr\[0\] must have shape \[groups\], got \[\]",
        ),
    ],
)
def test_buffers_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    buffers = {**cascade_buffers(torch.device("cpu")), **changes}
    with pytest.raises(ValueError, match=message):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1), **buffers)


@pytest.mark.parametrize("levels", [0, "2", 1.5, None])
def test_levels_and_workspace_that_are_none_are_refused(levels: Any) -> None:
    with pytest.raises(ValueError, match="num_levels must be a whole number of at least 1, got"):
        flashinfer.MultiLevelCascadeAttentionWrapper(levels, torch.empty(1))
    device: Any = "cuda"
    with pytest.raises(ValueError, match=r"float_workspace_buffer must be a .*, got str"):
        flashinfer.MultiLevelCascadeAttentionWrapper(1, device)


def test_a_caller_that_prewarms_before_a_capture_goes_on() -> None:
    """As with FlashInfer 0.7.2 and 0.7.4, between ``plan`` and the capture."""
    cpu = torch.device("cpu")
    buffers = cascade_buffers(cpu)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1), **buffers)
    with pytest.raises(ValueError, match="plan must be called before prewarm"):
        wrapper.prewarm_paged_kv_stride_variant()
    arrays = [[i32(level, cpu) for level in array] for array in STEPS[0]]
    wrapper.begin_forward(*arrays, 4, 2, 32, PAGE, **CASCADE)
    wrapper.prewarm_paged_kv_stride_variant()
    with pytest.raises(ValueError, match="variant must be \"independent\", got 'shared'"):
        wrapper.prewarm_paged_kv_stride_variant("shared")


@pytest.mark.interpreter
def test_queries_that_are_fewer_than_planned_are_refused() -> None:
    cpu = torch.device("cpu")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1))
    arrays = [[i32(level, cpu) for level in array] for array in STEPS[0]]
    wrapper.plan(*arrays, 4, 2, 32, PAGE, **CASCADE)
    with pytest.raises(ValueError, match="q must have at least 40 tokens, got 39"):
        wrapper.run(torch.zeros(39, 4, 32).bfloat16(), torch.zeros(16, 2, PAGE, 2, 32).bfloat16())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be NONE"),
        ({"use_fp16_qk_reduction": True}, "use_fp16_qk_reduction must be false"),
        ({"num_qo_heads": 5}, "num_qo_heads must be a multiple of 2, got 5"),
        ({"kv_data_type": torch.float16}, "kv_data_type must be torch.bfloat16"),
        ({"head_dim": 512}, "head_dim must be 16 to 256, got 512"),
        ({"num_kv_heads": 0}, "num_kv_heads and page_size must be at least 1, got 4, 0 and 4"),
        ({"qo_indptr_arr": [[0, 1]]}, r"qo_indptr_arr\[0\] must be a torch.Tensor, got list"),
        ({"qo_indptr_arr": [torch.tensor([1, 1])]}, r"qo_indptr_arr\[0\] must begin at 0 and not"),
        ({"paged_kv_indptr_arr": [torch.tensor([0, 2])]}, "must end at 1 pages at most, got 2"),
        ({"paged_kv_last_page_len": [torch.tensor([5])]}, "0 to the page size 4, got 5 to 5"),
        ({"paged_kv_last_page_len": [torch.tensor([-1])]}, "0 to the page size 4, got -1 to -1"),
        ({"paged_kv_last_page_len": [torch.tensor(1)]}, r"must have shape \[groups\], got \[\]"),
        ({"paged_kv_indices_arr": [torch.tensor([-1])]}, "must not be negative, got -1"),
        ({"paged_kv_indices_arr": [torch.tensor([0.0])]}, "must have dtype int32 or int64"),
        ({"paged_kv_indices_arr": torch.tensor([[0]])}, "every array must be a list of 1 tensors"),
        ({"sm_scale": math.nan}, "sm_scale must be a finite number, got nan"),
        ({"logits_soft_cap": "low"}, "logits_soft_cap must be a finite number, got 'low'"),
        ({"page_size": 4.0}, "page_size must be a whole number, got 4.0"),
    ],
)
def test_cascade_refuses(changes: dict[str, Any], message: str) -> None:
    cpu = torch.device("cpu")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, torch.empty(1))
    arguments: dict[str, Any] = {
        "qo_indptr_arr": [i32([0, 1], cpu)], "paged_kv_indptr_arr": [i32([0, 1], cpu)],
        "paged_kv_indices_arr": [i32([0], cpu)], "paged_kv_last_page_len": [i32([1], cpu)],
        "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4,
        "q_data_type": torch.bfloat16,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        wrapper.plan(**{**arguments, **changes})


def test_cascade_takes_slices_and_numbers_that_are_tensors(where: torch.device, seed: int) -> None:
    """Tables that are slices of others, which kernels would read past, and a scale of a tensor."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(5, 2, 32, generator=generator)
    cache = torch.randn(6, 2, 4, 1, 32, generator=generator)
    q, cache = (x.to(where, torch.float16) for x in (q, cache))
    tables = [i32(x, where) for x in ([0, 2, 5], [0, 2, 5], [0, 2, 4, 5, 1], [1, 3])]
    gaps = [torch.stack([x, -9 - x], 1)[:, 0] for x in tables]
    results = []
    numbers: list[Any] = [(0.3, 4.0), (torch.tensor(0.3), torch.tensor(4.0))]
    for given, (scale, cap) in zip((tables, gaps), numbers, strict=True):
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, torch.empty(1, device=where))
        arrays = [[x] for x in given]
        wrapper.plan(*arrays, 2, 1, 32, 4, sm_scale=scale, logits_soft_cap=cap)
        results.append(wrapper.run(q, cache))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    assert results[0].abs().sum() > 0


@pytest.mark.parametrize(
    "cache", [(torch.zeros(1, 4, 1, 32),) * 3, torch.zeros(1, 4, 1, 32), None, [0, 1]]
)
@pytest.mark.interpreter
def test_a_cache_that_is_none_is_named(cache: Any) -> None:
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, torch.empty(1))
    arrays = [[i32(x, torch.device("cpu"))] for x in ([0, 1], [0, 1], [0], [1])]
    wrapper.plan(*arrays, 1, 1, 32, 4)
    with pytest.raises(ValueError, match=r"paged_kv_cache must (be a|have)|keys must be a"):
        wrapper.run(torch.zeros(1, 1, 32).half(), cache)


@pytest.mark.parametrize("cap", [1e-2, 30.0, 1e6])
def test_any_soft_cap(where: torch.device, cap: float, seed: int) -> None:
    """A large cap changes nothing, yet left logits 0.06 apart."""
    q, k, v = torch.randn(3, 8, 2, 64, generator=torch.Generator().manual_seed(seed)).to(where)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, torch.empty(1, device=where))
    arrays = [i32([0, 8], where), i32([0, 1], where), i32([0], where), i32([8], where)]
    options: dict[str, Any] = {"logits_soft_cap": cap, "q_data_type": torch.float32}
    wrapper.plan(*([x] for x in arrays), 2, 2, 64, 8, **options)
    got = wrapper.run(q, (k[None], v[None])).double()
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / 8
    want = torch.einsum("hqk,khd->qhd", (cap * (logits / cap).tanh()).softmax(-1), v.double())
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_workspaces_are_taken_and_not_kept() -> None:
    """Positions and names are FlashInfer's; a workspace on another device is refused."""
    cpu, away = torch.empty(8, dtype=torch.uint8), torch.empty(8, device="meta")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, cpu)
    with pytest.raises(ValueError, match="int_workspace_buffers must be 2, one for each level"):
        wrapper.reset_workspace_buffer(cpu, [cpu])
    before = dict(vars(wrapper))
    wrapper.reset_workspace_buffer(cpu, [cpu, cpu])
    wrapper.reset_workspace_buffer(float_workspace_buffer=cpu, int_workspace_buffers=[cpu, cpu])
    with pytest.raises(ValueError, match="float_workspace_buffer must be on cpu, got meta"):
        wrapper.reset_workspace_buffer(away, [cpu, cpu])
    with pytest.raises(ValueError, match="int_workspace_buffer must be on cpu, got meta"):
        wrapper.reset_workspace_buffer(cpu, [cpu, away])
    nothing: Any = None
    with pytest.raises(ValueError, match=r"int_workspace_buffer must be a .*, got None"):
        wrapper.reset_workspace_buffer(cpu, [cpu, nothing])
    assert vars(wrapper) == before


def planned_in_a_graphs_memory() -> Any:
    """A function that plans a request of so many keys, and says what ``run`` then gives."""
    cpu = torch.device("cpu")
    one = i32([0, 1], cpu)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 2, 64, generator=generator).bfloat16()
    pair = torch.randn(2, 1, 16, 2, 64, generator=generator).bfloat16().unbind()
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (2, 2, 1, 1)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        1, torch.empty(1), "NHD", True, *([x] for x in buffers)
    )

    def plan(keys: int) -> torch.Tensor:
        arrays = [one, one, i32([0], cpu), i32([keys], cpu)]
        wrapper.plan(*([x] for x in arrays), 2, 2, 64, 16, q_data_type=torch.bfloat16)
        return wrapper.run(q, pair)

    return plan


@pytest.mark.interpreter
@pytest.mark.parametrize("first", [False, True])
def test_graphs_are_planned_in_inference_mode_and_outside_of_it(first: bool) -> None:
    """The mode belongs to a thread: one may warm up, and another plan."""
    plan, fresh = planned_in_a_graphs_memory(), planned_in_a_graphs_memory()
    with torch.inference_mode(first):
        plan(3)
    with torch.inference_mode(not first):
        got = plan(7)
    assert torch.equal(got, fresh(7)) and not torch.equal(got, fresh(3))
