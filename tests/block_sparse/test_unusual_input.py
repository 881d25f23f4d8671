"""Inputs of block-sparse and 8-bit attention that are unlike what a model hands in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from backend_core.launch.triton import KernelLaunch
from backend_core.testing.numerics import relative_error
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.drop_ins.sageattention import sageattn
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import from_kinds, uniform_sequences
from block_sparse_backend.plan.predicted import Choice, from_map, predict
from block_sparse_backend.sage import (
    packed_attention,
    predicted_attention,
    quantised_attention,
)
from block_sparse_backend.spec import SageMode

BLOCKS: dict[str, Any] = {"block_m": 64, "block_n": 64}
PATHS = ("torch", "triton")
both_paths = pytest.mark.parametrize("path", PATHS)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    device: torch.device, batch: int = 1, m: int = 96, n: int = 96, seed: int = 0
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, 2, length, 64, generator=generator, device="cpu", dtype=torch.float32)
        for length in (m, n, n)
    )
    return q.bfloat16().to(device), k.bfloat16().to(device), v.bfloat16().to(device)


@both_paths
def test_a_log_sum_exp_with_gaps_is_refused(device: torch.device, path: str) -> None:
    q, k, v = inputs(device)
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    memory = torch.full((1, 2, 96, 3), 7.0, device=device)
    with pytest.raises(ValueError, match="lse must have stride 1 in dimension 2, got 3"):
        block_sparse_attention(q, k, v, plan, path=path, lse=memory[..., 0])
    assert (memory == 7).all()


@both_paths
@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan"), float("inf")])
def test_a_scale_that_kernels_cannot_have(device: torch.device, path: str, scale: float) -> None:
    """Rows of NaN came of them."""
    q, k, v = inputs(device)
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    message = f"scale must be positive and finite, got {scale}"
    for attend in (block_sparse_attention, quantised_attention):
        with pytest.raises(ValueError, match=message):
            attend(q, k, v, plan, scale=scale, path=path)
    with pytest.raises(ValueError, match=message):
        predicted_attention(q, k, v, Choice(topk=0.5), scale=scale, path=path)
    with pytest.raises(ValueError, match=message):  # which gave a plan of no block
        predict(q, k, topk=0.5, scale=scale, path=path)


@pytest.mark.parametrize("scale", [[0.1], "small", torch.ones(2)])
def test_a_scale_that_is_no_number_is_named(device: torch.device, scale: Any) -> None:
    q, k, v = inputs(device)
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    for attend in (block_sparse_attention, quantised_attention):
        with pytest.raises(ValueError, match=r"^scale must be a number, got"):
            attend(q, k, v, plan, scale=scale)


@both_paths
def test_logits_far_from_zero(device: torch.device, path: str) -> None:
    """All of a size whose LSE fp32 rounds by more than the logarithm of the number of keys."""
    q, k, v = inputs(device, n=90)
    for x, value in ((q, 2.0**14), (k, 2.0**13)):
        x.zero_()[..., 0] = value
    want = v.float().mean(2, keepdim=True).expand(q.shape)
    for causal in (False, True):
        make = intervals.causal if causal else intervals.dense
        plan = make(96, 90, 2, device=device, **BLOCKS)
        rows = slice(95, None) if causal else slice(None)
        for attend in (block_sparse_attention, quantised_attention):
            out, _ = attend(q, k, v, plan, path=path)
            assert relative_error(out[:, :, rows], want[:, :, rows]) < 6e-2
            assert not causal or (out[:, :, :6] == 0).all()


@both_paths
@pytest.mark.parametrize("lengths", [(64, 96), (128, 96), (96, 64), (96, 128)])
def test_a_plan_of_other_lengths_is_refused(
    device: torch.device, path: str, lengths: tuple[int, int]
) -> None:
    """Rows stayed unwritten, or were written beyond the output."""
    q, k, v = inputs(device)
    kept = torch.ones(1, 2, *(length // 32 for length in lengths), device=device)
    x, y = (torch.randn(1, 2, length, 64, device=device) for length in lengths)
    options: dict[str, Any] = {"block_m": 32, "block_n": 32}
    got = f"queries and {lengths[1]} keys, got 96 and 96"
    for plan in (
        intervals.dense(*lengths, 2, device=device, **options),
        intervals.causal(*lengths, 2, device=device, **options),
        predict(x, y, topk=0.5, path=path, **options),
        from_map(kept, lengths, (32, 32), False, path),
    ):
        for attend in (block_sparse_attention, quantised_attention):
            with pytest.raises(ValueError, match=f"the plan's {lengths[0]} {got}"):
                attend(q, k, v, plan, path=path)


@both_paths
def test_heads_and_blocks_of_a_prediction(device: torch.device, path: str) -> None:
    """Kernels read other heads and batch entries than there were, and tokens of other blocks."""
    q, k, _ = inputs(device)
    wrong: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any], str]] = [
        (torch.cat([q, q[:, :1]], 1), k, {}, "heads of k must divide those of q, got 2 and 3"),
        (q, torch.cat([k, k[:, :1]], 1), {}, "heads of k must divide those of q, got 3 and 2"),
        (torch.cat([q, q]), k, {}, r"k must have shape \[2, Hkv, N, 64\], got \[1, 2, 96, 64\]"),
        (q, k[..., :32], {}, r"k must have shape \[1, Hkv, N, 64\]"),
        (q[0], k, {}, r"q must have 4 dimensions, got \[2, 96, 64\]"),
        (q, k, {"block_m": 0}, "block_m must be a whole number of at least 1, got 0"),
        (q, k, {"block_n": 32.0}, "block_n must be a whole number of at least 1, got 32.0"),
    ]
    if path == "triton":
        wrong.append((q, k, {"block_m": 24}, "must be multiples of 16 in Triton, got 24 and 64"))
    for a, b, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            predict(a, b, topk=0.5, path=path, **{**BLOCKS, **options})


@both_paths
def test_channels_of_a_prediction_need_not_be_adjacent(device: torch.device, path: str) -> None:
    q, k, _ = inputs(device, m=128, n=256)
    options: dict[str, Any] = {"topk": 0.3, "path": path, "block_m": 16, "block_n": 16}
    want = predict(q, k, **options)
    got = predict(*(x.mT.contiguous().mT for x in (q, k)), **options)
    assert torch.equal(got.rows, want.rows)
    for begin, _, end, _ in want.rows.tolist():
        assert torch.equal(got.cols[begin:end], want.cols[begin:end])


@both_paths
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, 2, 3), r"kept must have shape \[B, H, 3, 3\], got \[1, 2, 2, 3\]"),
        ((1, 0, 3, 3), "kept must have at least one head"),
        ((2, 3, 3), r"kept must have shape \[B, H, 3, 3\], got \[2, 3, 3\]"),
    ],
)
def test_a_map_of_other_shape(
    device: torch.device, path: str, shape: tuple[int, ...], message: str
) -> None:
    """A tile without a row of the map was not written."""
    with pytest.raises(ValueError, match=message):
        from_map(torch.ones(shape, device=device), (96, 96), (32, 32), False, path)


@both_paths
def test_offsets_that_are_slices_of_others(device: torch.device, path: str) -> None:
    """The kernel read what lay between them."""
    q, k, v = inputs(device)
    offsets = torch.tensor([0, 40, 40, 96], dtype=torch.int32, device=device)
    gaps = torch.stack([offsets, offsets + 7], 1)[:, 0]
    want = packed_attention(q, k, v, offsets, offsets, (56, 56), path=path)
    got = packed_attention(q, k, v, gaps, gaps, (56, 56), path=path)
    assert torch.equal(got, want)


@pytest.mark.interpreter
def test_what_is_no_tensor_or_number_of_a_plan_is_named() -> None:
    q, k, v = inputs(torch.device("cpu"))
    plan = intervals.dense(96, 96, 2, device="cpu", **BLOCKS)
    offsets: Any = [0, 96]
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: block_sparse_attention(q.tolist(), k, v, plan), "q must be a torch.Tensor"),
        (lambda: quantised_attention(q, k.tolist(), v, plan), "k must be a torch.Tensor"),
        (lambda: predicted_attention(q, k, (v,), Choice(topk=0.5)), "v must be a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: predict(q, k.tolist(), topk=0.5), "k must be a torch.Tensor"),
        (lambda: quantised_attention(q[..., :0], k[..., :0], v, plan), "at least one channel"),
        (lambda: block_sparse_attention(q[..., :0], k[..., :0], v, plan), "at least one channel"),
        (lambda: intervals.ragged(offsets, offsets, 96, 96, 2), "cu_seqlens_q must be a torch"),
        (lambda: intervals.dense(96, 96.0, 2), "kv_len must be a whole number"),  # type: ignore[arg-type]
        (lambda: intervals.causal(-1, 96, 2), "q_len must be a whole number of at least 0, got -1"),
        (lambda: intervals.dense(96, 96, 2, block_m=0), "block_m must be a whole number of at"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


@both_paths
def test_blocks_that_8_bit_attention_does_not_have(device: torch.device, path: str) -> None:
    """In torch some of them ended in its own error."""
    q, k, v = inputs(device)
    for block_n in (8, 48, 256):
        plan = intervals.dense(96, 96, 2, block_m=64, block_n=block_n, device=device)
        with pytest.raises(ValueError, match=f"must be 16, 32, 64 or 128, got {block_n}"):
            quantised_attention(q, k, v, plan, path=path)


@both_paths
def test_a_plan_of_fewer_sequences_is_refused(device: torch.device, path: str) -> None:
    """The second entry of the batch was not written."""
    q, k, v = inputs(device, batch=2)
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    with pytest.raises(ValueError, match="a sequence for each of the 2 entries of q's batch, got"):
        block_sparse_attention(q, k, v, plan, path=path)


def test_columns_are_numbered_in_int32() -> None:
    kinds = torch.ones((), dtype=torch.int8, device="cpu").expand(1, 8, 2**14, 2**14)
    with pytest.raises(ValueError, match=r"kinds must be fewer than 2\^31, got 2147483648"):
        from_kinds(kinds, 8, uniform_sequences(1, 2**20, 2**20, kinds.device), 64, 64)


@both_paths
@pytest.mark.parametrize("empty", [{"m": 0}, {"batch": 0}])
def test_no_query(device: torch.device, path: str, empty: dict[str, int]) -> None:
    q, k, v = inputs(device, **empty)
    plan = intervals.dense(q.shape[2], 96, 2, batch=len(q), device=device, **BLOCKS)
    for attend in (block_sparse_attention, quantised_attention):
        out, lse = attend(q, k, v, plan, path=path)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert sageattn(q, k, v).shape == q.shape
    for call in (
        lambda: predict(q, k, topk=0.5, path=path),
        lambda: predicted_attention(q, k, v, Choice(topk=0.5), path=path),
    ):
        with pytest.raises(ValueError, match="q must have at least one token, got shape"):
            call()


@both_paths
def test_no_key(device: torch.device, path: str) -> None:
    q, k, v = inputs(device, n=0)
    plan = intervals.dense(96, 0, 2, device=device, **BLOCKS)
    calls: list[Callable[[], object]] = [
        lambda: quantised_attention(q, k, v, plan, path=path),
        lambda: predict(q, k, topk=0.5, path=path),
        lambda: predicted_attention(q, k, v, Choice(topk=0.5), path=path),
        lambda: sageattn(q, k, v),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="k must have at least one token, got shape"):
            call()


@pytest.mark.interpreter
def test_more_heads_than_a_grid_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second axis of a grid ends at 65,535, so that all grids have one axis alone."""
    x = torch.zeros(4096, 16, 1, 64, dtype=torch.bfloat16, device="cpu")
    plan = intervals.dense(1, 1, 16, batch=4096, device=x.device, **BLOCKS)
    tokens = x.view(-1, 16, 64).transpose(0, 1)[None]
    offsets = torch.arange(4097, dtype=torch.int32, device=x.device)
    grids: list[tuple[int, int, int]] = []
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *given: grids.append(grid))
    quantised_attention(x, x, x, plan, path="triton")
    predict(x, x, topk=0.5, path="triton")
    predict(x, x, topk=0.5, min_likeness=0.3, path="triton")
    predicted_attention(x, x, x, Choice(topk=0.5), path="triton")
    packed_attention(tokens, tokens, tokens, offsets, offsets, (1, 1), path="triton")
    assert len(grids) > 25 and max(grids)[0] >= 65536
    assert all(grid[1:] == (1, 1) for grid in grids)


@pytest.fixture
def set_default() -> Iterator[Callable[[torch.dtype | str], None]]:
    def choose(default: torch.dtype | str) -> None:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)

    yield choose
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@both_paths
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"])
def test_no_default_of_torch_is_taken(
    device: torch.device,
    path: str,
    default: torch.dtype | str,
    set_default: Callable[[torch.dtype | str], None],
) -> None:
    q, k, v = inputs(device)
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    attends = (block_sparse_attention, quantised_attention)
    want = [attend(q, k, v, plan, path=path) for attend in attends]
    set_default(default)
    got = [attend(q, k, v, plan, path=path) for attend in attends]
    for (out, lse), (want_out, want_lse) in zip(got, want, strict=True):
        assert torch.equal(out, want_out) and torch.equal(lse, want_lse)


def test_autocast_leaves_fp32_products() -> None:
    q, k, v = (x.float() for x in inputs(torch.device("cpu")))
    plan = intervals.dense(96, 96, 2, device=q.device, **BLOCKS)
    want = block_sparse_attention(q, k, v, plan, path="torch")[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = block_sparse_attention(q, k, v, plan, path="torch")[0]
    assert torch.equal(got, want)


@both_paths
@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1e-30), (1e-20, 1e20, 1.0), (1e20, 1e-20, 1e-20)])
def test_magnitudes_of_bf16(
    device: torch.device, path: str, sizes: tuple[float, float, float]
) -> None:
    """Below 1e-10 all values, keys and queries were rounded to 0."""
    q, k, v = (x * size for x, size in zip(inputs(device), sizes, strict=True))
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    out = quantised_attention(q, k, v, plan, path=path)[0]
    want = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert relative_error(out, want) < 6e-2


@pytest.mark.parametrize("begin", [0, 1])
def test_values_in_16_bits_that_no_descriptor_reads(device: torch.device, begin: int) -> None:
    """Triton's own error came of them, after queries and keys had been quantised."""
    x = torch.randn(1, 2, 96, 66, device=device).half()[..., begin : begin + 64]
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    mode = SageMode(fp8_values=False)
    out = quantised_attention(x, x, x, plan, mode=mode, path="triton")[0]
    copy = x.contiguous()
    assert torch.equal(out, quantised_attention(*[copy] * 3, plan, mode=mode, path="triton")[0])


def test_one_entry_of_a_batch_has_no_stride(device: torch.device) -> None:
    x = torch.randn(3, 96 * 2 * 64 + 1, device=device).half()[:1, :-1].view(1, 96, 2, 64)
    x = x.transpose(1, 2)
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    out = block_sparse_attention(x, x, x, plan, path="triton")[0]
    assert relative_error(out, scaled_dot_product_attention(x, x, x)) < 2e-3


def test_gradients_are_refused(device: torch.device) -> None:
    """The kernels' outputs had none, without a word."""
    q, k, v = inputs(device)
    q.requires_grad_()
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    offsets = torch.tensor([0, 96], device=device)
    calls: list[Callable[[], object]] = [
        lambda: block_sparse_attention(k, q, v, plan),
        lambda: quantised_attention(q, k, v, plan),
        lambda: predicted_attention(k, k, q, Choice(topk=0.5)),
        lambda: packed_attention(q, k, v, offsets, offsets, (96, 96)),
        lambda: sageattn(q, k, v),
    ]
    for call in calls:
        with torch.no_grad():
            call()
        with pytest.raises(ValueError, match="no backward pass"):
            call()


@both_paths
@pytest.mark.parametrize("of", [0, 1, 2])
def test_nan_is_not_quantised_away(device: torch.device, path: str, of: int) -> None:
    """Of a query its row, of keys and values every row: integers gave plausible numbers."""
    given = [x.clone() for x in inputs(device)]
    given[of][0, 1, 40, 3] = torch.nan
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    out = quantised_attention(*given, plan, path=path)[0]
    rows = out.isnan().any(-1)
    assert not rows[0, 0].any() and rows[0, 1].sum() == (1 if of == 0 else 96)


@both_paths
def test_results_that_lie_over_one_another_are_refused(device: torch.device, path: str) -> None:
    q, k, v = inputs(device)
    plan = intervals.dense(96, 96, 2, device=device, **BLOCKS)
    out = torch.zeros(1, 1, 96, 64, dtype=q.dtype, device=device)
    with pytest.raises(ValueError, match="out must have elements that share no memory"):
        block_sparse_attention(q, k, v, plan, out=out.expand(-1, 2, -1, -1), path=path)
    with pytest.raises(ValueError, match="out must have elements that share no memory"):
        quantised_attention(q, k, v, plan, out=out.expand(-1, 2, -1, -1), path=path)
    assert not out.any()
