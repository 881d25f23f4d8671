"""What FlashInfer's paged prefill wrapper does with masks, encodings and CUDA graphs, on both paths
beside float64, with errors planted that the comparison must see."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softmax_backend import reference_block_sparse as reference
from softmax_backend.block_sparse import block_sparse_attention
from softmax_backend.flashinfer import BatchPrefillWithPagedKVCacheWrapper, encoding, prefill
from softmax_backend.flashinfer.packed_mask import unpacked
from softmax_backend.testing.prefill_cases import assert_matches
from tests.engines.kda.sglang.device_graph import DeviceGraph

HEADS, D, PAGE = 3, 64, 16


@pytest.fixture(params=["torch", "triton"])
def on_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The wrapper's path: the kernels run on the GPU or in the interpreter."""
    name: str = request.param
    call = functools.partial(block_sparse_attention, path=name)
    monkeypatch.setattr(prefill, "block_sparse_attention", call)
    return name


@dataclass
class Batch:
    """Requests over drawn pages; no request's pages are NaN."""

    q_lens: list[int]
    kv_lens: list[int]
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-n // PAGE) for n in self.kv_lens]
        self.indptr = torch.tensor([0, *counts]).cumsum(0).int()
        self.offsets = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        self.pages = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)].int()
        cache = torch.randn(sum(counts) + 2, 2, PAGE, 1, D, generator=generator)
        unused = torch.ones(len(cache), dtype=torch.bool)
        unused[self.pages.long()] = False
        cache[unused] = torch.nan
        self.last = torch.tensor([n - (c - 1) * PAGE if c else 0 for n, c in zip(
            self.kv_lens, counts, strict=True)], dtype=torch.int32)  # fmt: skip
        self.cache = cache.half().to(self.device)
        q = torch.randn(sum(self.q_lens), HEADS, D, generator=generator)
        self.q = q.half().to(self.device)
        sizes = [m * n for m, n in zip(self.q_lens, self.kv_lens, strict=True)]
        self.masks = [torch.rand(size, generator=generator) < 0.4 for size in sizes]

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.offsets, self.indptr, self.pages, self.last

    @property
    def custom_mask(self) -> Tensor:
        return torch.cat(self.masks).to(self.device)

    def packed_mask(self, order: Any = "little") -> Tensor:
        packed = [np.packbits(mask.numpy(), bitorder=order) for mask in self.masks]
        return torch.from_numpy(np.concatenate(packed)).to(self.device)

    def plan(self, wrapper: BatchPrefillWithPagedKVCacheWrapper, **options: Any) -> None:
        wrapper.plan(*self.arrays, HEADS, 1, D, PAGE, **options)

    def expected(
        self,
        i: int,
        causal: bool = False,
        window_left: int = -1,
        is_masked: bool = False,
        pos_encoding_mode: str = "NONE",
        rope_scale: float = 1.0,
        rope_theta: float = 1e4,
        logits_soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Request ``i`` in float64: output [H, M, D] and natural LSE [H, M], written from what
        FlashInfer's kernels do."""
        m, n = self.q_lens[i], self.kv_lens[i]
        pages = self.pages[self.indptr[i] : self.indptr[i + 1]].long()
        rows = self.cache.cpu()[pages].double()
        k, v = (x.reshape(-1, 1, D)[:n].transpose(0, 1) for x in rows.unbind(1))
        q = self.q.cpu()[self.offsets[i] : self.offsets[i + 1]].double().transpose(0, 1)
        at_q, at_k = torch.arange(m) + n - m, torch.arange(n)
        if is_masked:
            seen = self.masks[i].view(m, n)
        else:
            seen = at_k <= at_q[:, None] if causal else torch.ones(m, n, dtype=torch.bool)
        if window_left >= 0:
            seen = seen & (at_k + m + window_left >= n + torch.arange(m)[:, None])
        if pos_encoding_mode == "ROPE_LLAMA":
            frequency = rope_theta ** (-torch.arange(0, D, 2).double() / D) / rope_scale
            q, k = (
                as_pairs(x, torch.polar(torch.ones(()).double(), at[:, None] * frequency))
                for x, at in ((q, at_q), (k, at_k))
            )

        def logits(s: Tensor) -> Tensor:
            if pos_encoding_mode == "ALIBI":  # of three heads: two of two, then the first of four
                slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]).double()
                s = s + slopes[:, None, None] * (at_k - torch.arange(m)[:, None])
            return logits_soft_cap * torch.tanh(s / logits_soft_cap) if logits_soft_cap else s

        out, lse = reference.attention(q, k, v, seen, D**-0.5, logits)
        if sinks is not None:
            share = torch.sigmoid(lse - sinks.cpu()[:, None].double())
            out = torch.where(lse.isinf()[..., None], 0.0, out * share[..., None])
        return out, lse

    def check(self, got: tuple[Tensor, Tensor], **options: Any) -> None:
        """Outputs and base-2 LSEs of all requests."""
        out, lse = got
        for i in range(len(self.q_lens)):
            at = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
            if self.q_lens[i]:
                found = out[at].transpose(0, 1), lse[at].t() * math.log(2)
                assert_matches(found, self.expected(i, **options))


def as_pairs(x: Tensor, turn: Tensor) -> Tensor:
    turned = torch.complex(*x.chunk(2, -1)) * turn
    return torch.cat([turned.real, turned.imag], -1)


def wrapper_of(device: torch.device, **options: Any) -> BatchPrefillWithPagedKVCacheWrapper:
    return BatchPrefillWithPagedKVCacheWrapper(torch.empty(1, device=device), "NHD", **options)


def batch_of(seed: int, device: torch.device) -> Batch:
    """Two tiles and blocks, one query over one page, no query, and a request without keys."""
    return Batch([70, 1, 0, 9, 2], [130, 7, 20, 33, 0], seed, device)


OPTIONS: dict[str, dict[str, Any]] = {
    "mask": {"is_masked": True},
    "mask and window": {"is_masked": True, "causal": True, "window_left": 40},
    "window": {"window_left": 25},
    "alibi": {"causal": True, "pos_encoding_mode": "ALIBI"},
    "alibi, full": {"pos_encoding_mode": "ALIBI", "window_left": 50},
    "rope": {"causal": True, "pos_encoding_mode": "ROPE_LLAMA"},
    "rope, cap, mask": {
        "pos_encoding_mode": "ROPE_LLAMA",
        "rope_scale": 2.0,
        "rope_theta": 5e3,
        "logits_soft_cap": 3.0,
        "is_masked": True,
    },
    "cap": {"logits_soft_cap": 2.0, "causal": True},
}


def run_with(batch: Batch, options: dict[str, Any], form: str = "") -> tuple[Tensor, Tensor]:
    given = {name: value for name, value in options.items() if name != "is_masked"}
    if options.get("is_masked"):
        if form == "packed":  # goes before the other, as in FlashInfer
            given |= {"custom_mask": torch.zeros(1), "packed_custom_mask": batch.packed_mask()}
        else:
            given["custom_mask"] = batch.custom_mask
    wrapper = wrapper_of(batch.device)
    batch.plan(wrapper, **given)
    return wrapper.run_return_lse(batch.q, batch.cache)


def without_keys(options: dict[str, Any], batch: Batch) -> Batch:
    """RoPE needs as many keys as queries."""
    if options.get("pos_encoding_mode") != "ROPE_LLAMA":
        return batch
    return Batch(batch.q_lens[:4], batch.kv_lens[:4], batch.seed, batch.device)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_beside_float64(name: str, on_path: str, seed: int, device: torch.device) -> None:
    batch = without_keys(OPTIONS[name], batch_of(seed, device))
    batch.check(run_with(batch, OPTIONS[name]), **OPTIONS[name])


def test_a_packed_mask_is_the_mask(on_path: str, seed: int, device: torch.device) -> None:
    batch = batch_of(seed, device)
    got, want = (run_with(batch, {"is_masked": True}, form) for form in ("packed", ""))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    lengths = torch.tensor([len(mask) for mask in batch.masks])
    assert bool((lengths % 8 != 0).any())
    assert torch.equal(unpacked("m", batch.packed_mask(), lengths), batch.custom_mask)
    assert not torch.equal(unpacked("m", batch.packed_mask("big"), lengths), batch.custom_mask)


def test_sinks_beside_a_soft_cap(on_path: str, seed: int, device: torch.device) -> None:
    batch = batch_of(seed, device)
    wrapper = wrapper_of(device)
    batch.plan(wrapper, causal=True, logits_soft_cap=2.0)
    sinks = torch.tensor([0.5, -1.0, 2.0], device=device)
    got = wrapper.run_return_lse(batch.q, batch.cache, sinks=sinks)
    batch.check(got, causal=True, logits_soft_cap=2.0, sinks=sinks)


def test_forms_of_the_lse_and_rope_of_the_older_forward(seed: int, device: torch.device) -> None:
    batch = batch_of(seed, device)
    batch = Batch(batch.q_lens[:2], batch.kv_lens[:2], seed, device)
    wrapper = wrapper_of(device)
    batch.plan(wrapper, pos_encoding_mode="ROPE_LLAMA", causal=True)
    out, lse = wrapper.run_return_lse(batch.q, batch.cache)
    mine = torch.empty(HEADS, 71, device=device)
    again = wrapper.run_return_lse(batch.q, batch.cache, lse=mine, lse_base="ln", lse_layout="HN")
    assert torch.equal(again[0], out) and again[1] is mine
    torch.testing.assert_close(mine, lse.t() * math.log(2))
    options = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 100.0, "rope_scale": 4.0}
    turned = wrapper.forward(batch.q, batch.cache, True, **options)  # type: ignore[arg-type]
    assert isinstance(turned, Tensor)
    want = wrapper_of(device)
    batch.plan(want, causal=True, **options)
    other = want.run(batch.q, batch.cache)
    assert isinstance(other, Tensor) and torch.equal(turned, other)
    assert not torch.allclose(turned, out, atol=1e-2)
    with pytest.raises(ValueError, match="must be 'ROPE_LLAMA' as planned, got 'NONE'"):
        wrapper.forward(batch.q, batch.cache, True)


def interleaved(q: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table[positions][:, None].unbind(2)
    low, high = q.float()[..., ::2], q.float()[..., 1::2]
    return torch.stack([low * cos - high * sin, high * cos + low * sin], -1).flatten(-2).to(q.dtype)


@pytest.mark.parametrize(
    ("name", "module", "attribute", "wrong"),
    [
        ("rope", encoding, "rotated", interleaved),
        (
            "rope",
            encoding,
            "rotated",
            lambda q, table, positions, good=encoding.rotated: good(q, table, positions + 1),
        ),
        (
            "alibi",
            encoding,
            "alibi_slopes",
            lambda heads, device: 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads),
        ),
        (
            "mask",
            prefill,
            "checked_mask",
            lambda *given, good=prefill.checked_mask: good(*given).roll(1),
        ),
    ],
)
def test_planted_errors_are_seen(
    name: str,
    module: Any,
    attribute: str,
    wrong: Callable[..., Any],
    seed: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interleaved pairs, a position too far, slopes for another number of heads, and a mask that
    begins one element late."""
    batch = without_keys(OPTIONS[name], batch_of(seed, device))
    batch.check(run_with(batch, OPTIONS[name]), **OPTIONS[name])
    monkeypatch.setattr(module, attribute, wrong)
    got = run_with(batch, OPTIONS[name])
    with pytest.raises(AssertionError):
        batch.check(got, **OPTIONS[name])


def test_an_alibi_without_the_first_querys_place_has_another_lse(
    seed: int, device: torch.device
) -> None:
    """FlashInfer counts queries from the request's first; outputs do not see that, LSEs do."""
    batch = batch_of(seed, device)
    wrapper = wrapper_of(device)
    batch.plan(wrapper, **OPTIONS["alibi"])
    assert wrapper._placed is not None
    wrapper._placed.zero_()
    got = wrapper.run_return_lse(batch.q, batch.cache)
    with pytest.raises(AssertionError):
        batch.check(got, **OPTIONS["alibi"])


MASKED = torch.ones(70 * 130 + 7 + 9 * 33, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"custom_mask": MASKED[1:]}, "custom_mask must have an element for each .* 9404 .* 9403"),
        (
            {"packed_custom_mask": torch.zeros(1176, dtype=torch.uint8)},
            r"packed_custom_mask must be uint8 \[1177\], each of the 5 segments .* got .*\[1176\]",
        ),
        (
            {"packed_custom_mask": torch.zeros(1177)},
            r"packed_custom_mask must be uint8 \[1177\].* got torch.float32",
        ),
        ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode must be one of .* got 'ROPE'"),
        (
            {"pos_encoding_mode": "ROPE_LLAMA"},
            "every request must have as many keys as queries with ROPE_LLAMA",
        ),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 0.0}, "rope_theta must be positive"),
        (
            {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 30.0},
            "logits_soft_cap must be 0 or None with ALIBI, got 30.0",
        ),
        ({"logits_soft_cap": -1.0}, "cap must be positive, got -1.0"),
        ({"q_data_type": "float32"}, "data type must be float16 or bfloat16"),
    ],
)
def test_a_refused_plan_leaves_the_last(
    options: dict[str, Any], message: str, seed: int, device: torch.device
) -> None:
    batch = batch_of(seed, device)
    wrapper = wrapper_of(device)
    batch.plan(wrapper, **OPTIONS["alibi"])
    want = wrapper.run_return_lse(batch.q, batch.cache)
    with pytest.raises(ValueError, match=message) as error:
        batch.plan(wrapper, **options)
    assert "\n" not in str(error.value)
    torch.testing.assert_close(wrapper.run_return_lse(batch.q, batch.cache), want, rtol=0, atol=0)


def test_malformed_requests_and_calls_are_refused(seed: int, device: torch.device) -> None:
    batch = batch_of(seed, device)
    wrapper = wrapper_of(device)
    offsets, indptr, pages, last = batch.arrays
    for arrays, message in (
        ((offsets[:-1], indptr, pages, last), r"qo_indptr must have shape \[6\], got \[5\]"),
        ((offsets.flip(0), indptr, pages, last), "qo_indptr must begin at 0 and not fall"),
        ((offsets, indptr, pages[:-1], last), "paged_kv_indices must have at least the 15 pages"),
        ((offsets, indptr, pages, last + 16), "paged_kv_last_page_len must be 1 to 16 where"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*arrays, HEADS, 1, D, PAGE)
    with pytest.raises(ValueError, match="num_qo_heads must be a multiple of 2, got 3"):
        wrapper.plan(*batch.arrays, HEADS, 2, D, PAGE)
    batch.plan(wrapper, pos_encoding_mode="ALIBI")
    out = torch.full_like(batch.q, torch.nan)
    lse = torch.full(batch.q.shape[:2], torch.nan, device=device)
    for q, options, message in (
        (batch.q[1:], {}, "q must have 82 to 82 tokens, got 81"),
        (batch.q[:, 1:], {}, r"q must have shape \[tokens, 3, 64\], got \[82, 2, 64\]"),
        (batch.q, {"sinks": torch.zeros(3)}, "sinks must be None with ALIBI"),
        (batch.q, {"lse_base": "log10"}, 'lse_base must be "log2" or "ln" and lse_layout'),
        (batch.q, {"lse_layout": "HN"}, r"lse must have shape \[3, 82\], got \[82, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(q, batch.cache, out=out, lse=lse, return_lse=True, **options)
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


ROOM = {"pages": 24, "mask_bytes": 2500}


def graph_buffers(device: torch.device, requests: int, has_mask: bool) -> dict[str, Any]:
    """Buffers for so many requests, poisoned."""
    poison = 2147480000

    def buffer(length: int) -> Tensor:
        return torch.full((length,), poison, dtype=torch.int32, device=device)

    found: dict[str, Any] = {
        "use_cuda_graph": True,
        "qo_indptr_buf": buffer(requests + 1),
        "paged_kv_indptr_buf": buffer(requests + 1),
        "paged_kv_indices_buf": buffer(ROOM["pages"]),
        "paged_kv_last_page_len_buf": buffer(requests),
    }
    if has_mask:
        found["custom_mask_buf"] = torch.zeros(ROOM["mask_bytes"], dtype=torch.uint8, device=device)
        found["mask_indptr_buf"] = buffer(requests + 1)
    return found


STEPS = [([70, 1, 9], [130, 7, 33]), ([1, 1, 1], [90, 150, 16]), ([3, 0, 66], [3, 70, 100])]


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "alibi, full"])
def test_a_captured_run_serves_the_last_plan(
    name: str, on_path: str, seed: int, device: torch.device
) -> None:
    """Planned again, ``run`` launches what it launched before, on the same memory."""
    options = OPTIONS[name]
    given = {key: value for key, value in options.items() if key != "is_masked"}
    is_masked = "is_masked" in options
    buffers = graph_buffers(device, 3, is_masked)
    wrapper = wrapper_of(device, **buffers)
    assert wrapper.is_cuda_graph_enabled
    q = torch.zeros(80, HEADS, D, dtype=torch.float16, device=device)
    cache = torch.full((26, 2, PAGE, 1, D), torch.nan, dtype=torch.float16, device=device)
    graph, got, plans = DeviceGraph(), None, []
    for number, (q_lens, kv_lens) in enumerate(STEPS):
        batch = Batch(q_lens, kv_lens, seed + number, device)
        mask = {"custom_mask": batch.custom_mask} if is_masked else {}
        batch.plan(wrapper, **given, **mask)
        plans.append(wrapper._plan)
        cache.fill_(torch.nan)
        cache[: len(batch.cache)] = batch.cache
        tokens = len(batch.q)
        q[:tokens] = batch.q
        if on_path == "torch":  # which reads the plan on the host
            got = wrapper.run_return_lse(q, cache)
        elif number == 0:
            got = graph.record(lambda: wrapper.run_return_lse(q, cache))
            assert device.type == "cuda" or graph.kernels == ["block_sparse_kernel"]
        else:
            graph.replay()
        assert got is not None
        batch.check((got[0][:tokens], got[1][:tokens]), **options)
        assert bool((got[0][tokens:] == 0).all())
        used = len(batch.pages)
        assert torch.equal(buffers["paged_kv_indices_buf"][:used].cpu(), batch.pages)
        assert torch.equal(buffers["qo_indptr_buf"].cpu(), batch.offsets)
    assert plans[0] is plans[1] and plans[1] is plans[2]
    assert plans[0].pages.indices is buffers["paged_kv_indices_buf"]


def test_a_plan_that_a_replay_does_not_see_is_seen_here(seed: int, device: torch.device) -> None:
    """The comparison fails where a later plan stays out of the captured memory."""
    wrapper = wrapper_of(device, **graph_buffers(device, 3, False))
    first, second = (Batch(*step, seed + i, device) for i, step in enumerate(STEPS[:2]))
    first.plan(wrapper, causal=True)
    assert wrapper._plan is not None
    kept = {name: x.clone() for name, x in wrapper._plan._tensors().items()}
    second.plan(wrapper, causal=True)
    for name, x in wrapper._plan._tensors().items():
        if name != "pages.indices":
            x.copy_(kept[name])
    q = torch.zeros_like(first.q)
    q[:3] = second.q
    out, lse = wrapper.run_return_lse(q, second.cache)
    with pytest.raises(AssertionError):
        second.check((out[:3], lse[:3]), causal=True)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (([1, 1], [1, 1]), {}, "must have the 3 requests of the buffers, got 2"),
        (([70, 1, 10], [80, 9, 10]), {}, "at most 80 query tokens, got 81"),
        (([1, 1, 1], [200, 150, 50]), {}, "at most 24 pages, got 27"),
        (([1, 1, 1], [9, 161, 9]), {}, "at most 160 keys in one request, got 161"),
        (STEPS[1], {"sm_scale": 0.3}, "every plan must have the settings of the first"),
        (STEPS[1], {"causal": False}, "every plan must have the settings of the first"),
        (STEPS[1], {"custom_mask": MASKED}, "every plan must have the settings of the first"),
    ],
)
def test_a_plan_that_does_not_fit_the_graph_is_refused(
    step: tuple[list[int], list[int]],
    options: dict[str, Any],
    message: str,
    seed: int,
    device: torch.device,
) -> None:
    buffers = graph_buffers(device, 3, False)
    wrapper = wrapper_of(device, **buffers)
    first, other = Batch(*STEPS[0], seed, device), Batch(*step, seed, device)
    first.plan(wrapper, causal=True, max_sequence_kv=160)
    assert wrapper._plan is not None
    memory = {**wrapper._plan._tensors(), **{k: x for k, x in buffers.items() if x is not True}}
    kept = {name: x.clone() for name, x in memory.items()}
    with pytest.raises(ValueError, match=message) as error:
        other.plan(wrapper, **{"causal": True, **options})
    assert "\n" not in str(error.value)
    assert all(torch.equal(kept[name], x) for name, x in memory.items())
    first.check(wrapper.run_return_lse(first.q, first.cache), causal=True)


def test_masks_and_buffers_of_graphs(seed: int, device: torch.device) -> None:
    batch = Batch(*STEPS[0], seed, device)
    plain, masked = (wrapper_of(device, **graph_buffers(device, 3, x)) for x in (False, True))
    with pytest.raises(ValueError, match="a custom mask must come with custom_mask_buf and"):
        batch.plan(plain, custom_mask=batch.custom_mask)
    with pytest.raises(ValueError, match="with a mask in every plan, got a plan without a mask"):
        batch.plan(masked)
    long = Batch([80, 80, 80], [96, 90, 80], seed, device)
    with pytest.raises(ValueError, match="at most 2500 bytes of packed mask, got 2660"):
        long.plan(masked, custom_mask=long.custom_mask)
    missing = graph_buffers(device, 3, False) | {"paged_kv_indices_buf": None}
    with pytest.raises(ValueError, match="use_cuda_graph needs paged_kv_indices_buf, got None"):
        wrapper_of(device, **missing)
    for wrong, message in (
        (
            {"paged_kv_indptr_buf": torch.zeros(3, dtype=torch.int32, device=device)},
            r"paged_kv_indptr_buf must have shape \[4\], got \[3\]",
        ),
        (
            {"paged_kv_indices_buf": torch.zeros(9, device=device)},
            "paged_kv_indices_buf must have dtype int32, got float32",
        ),
        (
            {"custom_mask_buf": torch.zeros(9, dtype=torch.uint8)},
            "custom_mask_buf and mask_indptr_buf must be given together",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper_of(device, **(graph_buffers(device, 3, False) | wrong))
